"""`sok.GroupEmbedding`: the features of a model as one Keras layer with one lookup.

{"user": [batch], "film": [batch], "genres": [batch, None]}     integers or strings
     |               |                |
  table user      table film      table genres                  one lookup of the group
     |               |                |
{"user": [batch, 16], "film": [batch, 16], "genres": [batch, 8]}
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import tensorflow as tf

from sok_like.lookup import padding
from sok_like.lookup.flat_ids import FlatIds, flat_values, with_flat_values
from sok_like.lookup.hash_lookup import HashFeature, lookup
from sok_like.lookup.sparse_ids import samples_of
from sok_like.lookup.table_layer import freeze_tables, keras_arguments, unless_frozen
from sok_like.lookup.training_flag import by_training
from sok_like.runtime.checks import (
    OPTIONAL_COMBINERS,
    as_integer,
    check_combiner,
    wrong_argument,
)
from sok_like.runtime.ranks.lookup_options import check_gradient_scale, check_row_dtype
from sok_like.table.keys import check_kind, may_be_keys
from sok_like.table.options import option_config, option_from_config
from sok_like.table.variable import EmbeddingVariable


@tf.keras.utils.register_keras_serializable("sok_like")
class GroupEmbedding(tf.keras.layers.Layer):
    """Embeddings of several features, each in a hash table, with one exchange for all of them.

    Args:
        embedding_dims: Length of each feature's rows: a dictionary by feature name, or a list.
        tables: Name of each feature's table, a dictionary or a list like `embedding_dims`. Features
            with the same table share its rows. Features that are left out, or all for None, have
            tables of their own.
        combiners: "sum", "mean" or "sqrtn" of a sample's rows, or None, which keeps the row of each
            key: one for all features, or a dictionary or a list like `embedding_dims` (left out of
            a dictionary: "mean").
        table_options: Dictionary from a table's name to keyword arguments of its
            sok.EmbeddingVariable: `initializer`, `capacity`, `ev_option`, ...
        pad_key: A value that is padding and not a key: an integer, or a string for features of
            strings; also in ragged and sparse features. Without a combiner its rows are zeros, and
            the output has a Keras mask, False for padding. None: every value is a key, and there
            are no masks.
        gradient_scale: "auto", "sum" or "mean" over ranks of a row's gradients, see
            docs/semantics/ranks.md.
        wire_dtype: "bfloat16" or "float16" rounds rows and gradients on their way between ranks,
            see docs/semantics/ranks.md. None or "float32": no rounding.
        **kwargs: Keras' own: `name`, `dtype`, `trainable`. The name is part of the tables' names,
            on which initial rows depend.

    Input shape:
        A dictionary (other entries are ignored) or a list of features, of integers or strings. Each
        is dense `[batch]` or `[batch, hotness]`, a RaggedTensor `[batch, None]`, or a SparseTensor
        `[batch, max_hotness]`. The key of a string is its 64-bit fingerprint.

    Output shape:
        A dictionary or a list like `embedding_dims`, in the layer's compute dtype. Per feature
        `[batch, embedding_dim]`; a sample without keys gives zeros. Without a combiner, features
        `[batch, hotness]` give `[batch, hotness, embedding_dim]`, and ragged and sparse ones a
        RaggedTensor `[batch, None, embedding_dim]`.

    Raises:
        ValueError: an argument is of another kind, features with the same table differ in
            `embedding_dims`, or the input lacks a feature.
        TypeError: a feature has neither integers nor strings, or a table has features of both.
        RuntimeError: `sok.Init` has not been called.
    """

    def __init__(
        self,
        embedding_dims: Mapping[str, int] | Sequence[int],
        *,
        tables: Mapping[str, str] | Sequence[str] | None = None,
        combiners: str | Mapping[str, str | None] | Sequence[str | None] | None = "mean",
        table_options: Mapping[str, Mapping[str, Any]] | None = None,
        pad_key: int | str | None = None,
        gradient_scale: str = "auto",
        wire_dtype: Any = None,
        **kwargs: Any,
    ):
        super().__init__(autocast=False, **keras_arguments(kwargs))
        self.supports_jit = False  # XLA cannot compile the tables' ops
        self.gradient_scale = check_gradient_scale(gradient_scale)
        self.wire_dtype = check_row_dtype(wire_dtype, f"layer '{self.name}'")
        self.pad_key = pad_key
        if not isinstance(pad_key, str):
            self.pad_key = padding.check_pad_key(pad_key, f"layer '{self.name}'")
        self._is_dict = isinstance(embedding_dims, Mapping)
        dims = _by_feature("embedding_dims", embedding_dims, None, None)
        own = {name: name if self._is_dict else f"table_{name}" for name in dims}
        for name, dim in dims.items():
            if (as_integer(dim) or 0) < 1:
                raise ValueError(
                    "`embedding_dims` must hold positive integers. "
                    f"Received: embedding_dims[{name!r}]={dim!r}"
                )
        self._dims = {name: as_integer(dim) for name, dim in dims.items()}
        self._table_names = _by_feature("tables", tables, dims, own)
        if combiners is None or isinstance(combiners, str):
            combiners = dict.fromkeys(dims, combiners) if self._is_dict else [combiners] * len(dims)
        self._combiners = {
            name: check_combiner(combiner, OPTIONAL_COMBINERS)
            for name, combiner in _by_feature(
                "combiners", combiners, dims, dict.fromkeys(dims, "mean")
            ).items()
        }
        self._table_options = {
            name: {
                key: tf.keras.initializers.get(value)
                if key == "initializer"
                else option_from_config(value)
                for key, value in options.items()
            }
            for name, options in (table_options or {}).items()
        }
        self._tables = _Tables(self._make_tables())
        freeze_tables(self)
        self.supports_masking = pad_key is not None and None in self._combiners.values()
        self.built = True

    def _make_tables(self):
        unknown = sorted(set(self._table_options) - set(self._table_names.values()))
        if unknown:
            raise ValueError(
                "`table_options` must name tables of the features, "
                f"{sorted(set(self._table_names.values()))}. Received: {unknown} "
                f"(layer '{self.name}')"
            )
        tables: dict[str, EmbeddingVariable] = {}
        for feature, name in self._table_names.items():
            if name not in tables:
                tables[name] = EmbeddingVariable(
                    self._dims[feature],
                    **self._table_options.get(name, {}),
                    name=f"{self.name}/{name}",
                )
                setattr(self, f"_table_{len(tables)}", tables[name].as_weight())
            elif tables[name].dim != self._dims[feature]:
                raise ValueError(
                    f"Features of table '{name}' must have the same width, {tables[name].dim}. "
                    f"Received: embedding_dims[{feature!r}]={self._dims[feature]} "
                    f"(layer '{self.name}')"
                )
        return tables

    @property
    def tables(self) -> dict[str, EmbeddingVariable]:
        """The tables by name."""
        return dict(self._tables.by_name)

    def build(self, input_shape=None):
        # This only tells Keras that the layer is built.
        self.built = True

    def call(self, inputs, training=None):
        features = self._features(inputs)
        ids = self._flat_ids(features)
        tables = [self._tables.by_name[self._table_names[name]] for name in features]

        def rows(training):
            combined = lookup(
                [
                    HashFeature(table, i.ids, i.combiner, i.row_splits)
                    for table, i in zip(tables, ids, strict=True)
                ],
                training=training,
                gradient_scale=self.gradient_scale,
                wire_dtype=self.wire_dtype,
                name=self.name,
            )
            outputs = [i.restore(tensor) for i, tensor in zip(ids, combined, strict=True)]
            return [tf.cast(output, self.compute_dtype) for output in outputs]

        return self._structure(unless_frozen(self, by_training(training, rows)))

    def _features(self, inputs):
        """The layer's features by name, from a dictionary or a list."""
        if self._is_dict != isinstance(inputs, Mapping) or not (
            self._is_dict or isinstance(inputs, (list, tuple))
        ):
            kind = "a dictionary" if self._is_dict else "a list"
            raise ValueError(
                f"The input must be {kind} of features, as `embedding_dims` is. "
                f"Received: {inputs!r} (layer '{self.name}')"
            )
        features = dict(inputs) if self._is_dict else dict(enumerate(inputs))
        missing = [name for name in self._dims if name not in features]
        if missing or (not self._is_dict and len(features) != len(self._dims)):
            raise ValueError(
                f"The input must hold the features {list(self._dims)}. "
                f"Received: {list(features)} (layer '{self.name}')"
            )
        return {name: features[name] for name in self._dims}

    def _flat_ids(self, features):
        """The features as flat keys."""
        values = {
            name: value if tf.is_tensor(value) else tf.convert_to_tensor(value)
            for name, value in features.items()
        }
        for name, value in values.items():
            self._check(name, value)
        keys = {
            name: with_flat_values(value, padding.keys_of_ids(flat_values(value)))
            if _is_composite(value)
            else padding.keys_of_ids(value)
            for name, value in values.items()
        }
        sparse = [
            name
            for name, value in keys.items()
            if isinstance(value, tf.SparseTensor) and value.shape.rank == 2
        ]
        # One op sorts the sparse features of all tables.
        for name, samples in zip(sparse, samples_of([keys[n] for n in sparse]), strict=True):
            flat, splits = samples.keys, samples.row_splits
            keys[name] = tf.RaggedTensor.from_row_splits(flat, splits, validate=False)
        return [
            FlatIds(
                keys[name],
                None if value.shape.rank == 1 else self._combiners[name],
                hashed=True,
                pad_key=self.pad_key if self._may_be_padded(value.dtype) else None,
            )
            for name, value in values.items()
        ]

    def _check(self, name, values):
        """Raises unless a tensor, or Keras 3's symbol for one, can be this feature."""
        where = f"(feature {name!r} of layer '{self.name}')"
        dtype, rank = tf.as_dtype(values.dtype), tf.TensorShape(values.shape).rank
        dense = not _is_composite(values)
        if dense and rank not in (1, 2):
            raise ValueError(
                "A dense feature must be of shape [batch] or [batch, hotness]. "
                f"Received: shape {values.shape} {where}"
            )
        if not dense and rank not in (2, None):
            raise ValueError(
                "A ragged or sparse feature must have two axes, [batch, None]. "
                f"Received: shape {values.shape} {where}"
            )
        if dtype != tf.string and not may_be_keys(dtype):
            raise TypeError(
                "A feature must hold integers or strings. Give `tf.keras.Input` the dtype 'int64' "
                "or 'string', or put `tf.keras.layers.Discretization` before it. "
                f"Received: {dtype.name} {where}"
            )
        check_kind(self._tables.by_name[self._table_names[name]], dtype, where[1:-1])
        # Only Keras, when it builds a model, passes floats.
        padded = self.pad_key is not None and dense and rank == 2 and not dtype.is_floating
        if padded and not self._may_be_padded(dtype):
            raise ValueError(
                "`pad_key` must have the same kind (integer or string) as every feature of shape "
                "[batch, hotness]; pass other features as RaggedTensors. "
                f"Received: pad_key={self.pad_key!r}, {dtype.name} {where}"
            )

    def _may_be_padded(self, dtype):
        of_its_kind = isinstance(self.pad_key, str) == (dtype == tf.string)
        return self.pad_key is not None and of_its_kind

    def _structure(self, values):
        return dict(zip(self._dims, values, strict=True)) if self._is_dict else list(values)

    def compute_mask(self, inputs, mask=None):
        """Masks like the output; None for features that are combined."""
        if not self.supports_masking:
            return None
        masks = []
        for name, value in self._features(inputs).items():
            value = value if hasattr(value, "dtype") else tf.convert_to_tensor(value)
            masked = self._combiners[name] is None and self._may_be_padded(tf.as_dtype(value.dtype))
            masks.append(padding.mask_of(value, self.pad_key) if masked else None)
        return self._structure(masks)

    def compute_output_shape(self, input_shape):
        shapes = self._features(input_shape)
        return self._structure([self._shape(name, shape) for name, shape in shapes.items()])

    def _shape(self, name, shape):
        leading = tuple(shape) if self._combiners[name] is None else tuple(shape)[:1]
        return (*leading, self._dims[name])

    def compute_output_spec(self, inputs, training=None):
        import keras

        features = self._features(inputs)
        for name, value in features.items():
            self._check(name, value)
        return self._structure(
            [
                keras.KerasTensor(
                    self._shape(name, value.shape),
                    dtype=self.compute_dtype,
                    ragged=self._combiners[name] is None and _is_composite(value),
                )
                for name, value in features.items()
            ]
        )

    def get_config(self):
        options = {
            name: {key: _option_config(key, value) for key, value in given.items()}
            for name, given in self._table_options.items()
        }
        return {
            **super().get_config(),
            "embedding_dims": self._structure(self._dims.values()),
            "tables": self._structure(self._table_names.values()),
            "combiners": self._structure(self._combiners.values()),
            "table_options": options,
            "pad_key": self.pad_key,
            "gradient_scale": self.gradient_scale,
            "wire_dtype": self.wire_dtype,
        }


class _Tables:
    """Tables by name. It is opaque to Keras, which sees the attributes."""

    def __init__(self, by_name):
        self.by_name = by_name


def _by_feature(argument, values, features, default):
    """A dictionary by feature: names of a dictionary, positions of a list."""
    if values is None and features is not None:
        return default
    if isinstance(values, str) or not hasattr(values, "__len__") or not len(values):
        required = "a dictionary or a list with an entry for each feature"
        raise wrong_argument(argument, required, values)
    by_feature = dict(values) if isinstance(values, Mapping) else dict(enumerate(values))
    if features is None:
        return by_feature
    unknown = [name for name in by_feature if name not in features]
    if unknown or (not isinstance(values, Mapping) and len(by_feature) != len(features)):
        raise ValueError(
            f"`{argument}` must have an entry for each feature of {list(features)}. "
            f"Received: {argument}={values!r}"
        )
    return {name: by_feature.get(name, default[name]) for name in features}


def _is_composite(values):
    """Whether a feature, or Keras 3's symbol for one, is ragged or sparse."""
    composite = isinstance(values, (tf.RaggedTensor, tf.SparseTensor))
    return composite or any(getattr(values, kind, False) for kind in ("sparse", "ragged"))


def _option_config(name, value):
    if name == "initializer":
        return tf.keras.initializers.serialize(value)
    if name in ("key_dtype", "dtype") and value is not None:
        return tf.as_dtype(value).name
    return option_config(value)
