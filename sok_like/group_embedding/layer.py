"""`sok.GroupEmbedding`: the features of a model as one Keras layer with one lookup.

{"user": [batch], "film": [batch], "genres": [batch, None]}     integers or strings
     |               |                |
  table user      table film      table genres                  one lookup of the group
     |               |                |
{"user": [batch, 16], "film": [batch, 16], "genres": [batch, 8]}
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from sok_like.lookup.hash_lookup import HashFeature
from sok_like.lookup.ids import FlatIds, check_pad_key, keys_of_ids, mask_of, samples_of
from sok_like.lookup.table_layer import TablesLayer, in_config
from sok_like.runtime.checks import OPTIONAL_COMBINERS, as_integer, check_combiner, require, unmet
from sok_like.runtime.ranks.lookup_options import check_gradient_scale, check_row_dtype
from sok_like.table.keys import check_kind, may_be_keys
from sok_like.table.options import option_config, option_from_config
from sok_like.table.variable import EmbeddingVariable


class _Feature(NamedTuple):
    dim: int
    table: str  # its name
    combiner: str | None


@tf.keras.utils.register_keras_serializable("sok_like")
class GroupEmbedding(TablesLayer):
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
            strings; also in ragged and sparse features. It is neither inserted nor trained, nor in
            a sum or mean. Without a combiner its rows are zeros, and the output has a Keras mask,
            False for padding. None: every value is a key, also -1, and there are no masks.
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

    _arguments = ("pad_key", "gradient_scale", "wire_dtype")

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
        super().__init__(autocast=False, **kwargs)
        self.gradient_scale = check_gradient_scale(gradient_scale)
        self.wire_dtype = check_row_dtype(wire_dtype, f"layer '{self.name}'")
        self.pad_key = pad_key
        if not isinstance(pad_key, str):
            self.pad_key = check_pad_key(pad_key, f"layer '{self.name}'")
        self._is_dict = isinstance(embedding_dims, Mapping)
        dims = _by_feature("embedding_dims", embedding_dims, None, None)
        are_positive = all((as_integer(dim) or 0) >= 1 for dim in dims.values())
        require(are_positive, "embedding_dims", "positive integers", embedding_dims)
        own = {name: name if self._is_dict else f"table_{name}" for name in dims}
        table_names = _by_feature("tables", tables, dims, own)
        if combiners is None or isinstance(combiners, str):
            combiners = dict.fromkeys(dims, combiners)
        combiners = _by_feature("combiners", combiners, dims, dict.fromkeys(dims, "mean"))
        self._features = {}
        for name, dim in dims.items():
            combiner = check_combiner(combiners[name], OPTIONAL_COMBINERS)
            self._features[name] = _Feature(int(dim), table_names[name], combiner)
        self._table_options = {
            name: {
                key: tf.keras.initializers.get(value)
                if key == "initializer"
                else option_from_config(value)
                for key, value in options.items()
            }
            for name, options in (table_options or {}).items()
        }
        # Bypasses Keras' __setattr__: it sees the attributes that `_make_tables` sets.
        object.__setattr__(self, "_tables", self._make_tables())
        self._freeze_tables()
        has_rows = any(feature.combiner is None for feature in self._features.values())
        self.supports_masking = pad_key is not None and has_rows
        self.built = True

    def _make_tables(self):
        names = sorted({feature.table for feature in self._features.values()})
        unknown = sorted(set(self._table_options) - set(names))
        if unknown:
            required = f"name tables of the features, {names}"
            raise unmet("`table_options`", required, unknown, f"layer '{self.name}'")
        tables: dict[str, EmbeddingVariable] = {}
        for name, feature in self._features.items():
            if feature.table not in tables:
                options = self._table_options.get(feature.table, {})
                table = EmbeddingVariable(
                    feature.dim, **options, name=f"{self.name}/{feature.table}"
                )
                tables[feature.table] = table
                setattr(self, f"_table_{len(tables)}", table.as_weight())
            elif tables[feature.table].dim != feature.dim:
                subject = f"Features of table '{feature.table}'"
                required = f"have the same width, {tables[feature.table].dim}"
                received = f"embedding_dims[{name!r}]={feature.dim}"
                raise unmet(subject, required, received, f"layer '{self.name}'")
        return tables

    @property
    def tables(self) -> dict[str, EmbeddingVariable]:
        """The tables by name."""
        return dict(self._tables)

    def call(self, inputs, training=None):
        ids = self._flat_ids(self._given(inputs))
        tables = [self._tables[feature.table] for feature in self._features.values()]
        features = [
            HashFeature(table, i.ids, i.combiner, i.row_splits)
            for table, i in zip(tables, ids, strict=True)
        ]
        rows_of_features = zip(ids, self.look_up(training, features), strict=True)
        return self._structure(self.as_output(i.restore(rows)) for i, rows in rows_of_features)

    def _given(self, inputs):
        """The layer's features by name, from a dictionary or a list."""
        if not isinstance(inputs, Mapping if self._is_dict else (list, tuple)):
            kind = "a dictionary" if self._is_dict else "a list"
            required = f"be {kind} of features, as `embedding_dims` is"
            raise unmet("The input", required, f"{inputs!r}", f"layer '{self.name}'")
        given = dict(inputs) if self._is_dict else dict(enumerate(inputs))
        missing = [name for name in self._features if name not in given]
        if missing or (not self._is_dict and len(given) != len(self._features)):
            required = f"hold the features {list(self._features)}"
            raise unmet("The input", required, list(given), f"layer '{self.name}'")
        return {name: given[name] for name in self._features}

    def _flat_ids(self, given):
        """The features as flat keys."""
        keys, dtypes = {}, {}
        for name, value in given.items():
            value = value if tf.is_tensor(value) else tf.convert_to_tensor(value)
            self._check(name, value)
            dtypes[name] = value.dtype
            keys[name] = keys_of_ids(value)
        # One op sorts the sparse features of all tables.
        values = keys.items()
        sparse = [n for n, v in values if isinstance(v, tf.SparseTensor) and v.shape.rank == 2]
        samples = samples_of([keys[name] for name in sparse])
        for name, (flat, splits, _) in zip(sparse, samples, strict=True):
            keys[name] = tf.RaggedTensor.from_row_splits(flat, splits, validate=False)
        ids = []
        for name, value in keys.items():
            combiner = None if value.shape.rank == 1 else self._features[name].combiner
            pad_key = self.pad_key if self._may_be_padded(dtypes[name]) else None
            ids.append(FlatIds(value, combiner, hashed=True, pad_key=pad_key))
        return ids

    def _check(self, name, values):
        """Raises unless a tensor, or Keras 3's symbol for one, can be this feature."""
        of = f"feature {name!r} of layer '{self.name}'"
        dtype, rank = tf.as_dtype(values.dtype), tf.TensorShape(values.shape).rank
        dense = not _is_composite(values)
        if dense and rank not in (1, 2):
            required = "be of shape [batch] or [batch, hotness]"
            raise unmet("A dense feature", required, f"shape {values.shape}", of)
        if not dense and rank not in (2, None):
            required = "have two axes, [batch, None]"
            raise unmet("A ragged or sparse feature", required, f"shape {values.shape}", of)
        if dtype != tf.string and not may_be_keys(dtype):
            required = "hold integers or strings. Give `tf.keras.Input` the dtype 'int64' or "
            required += "'string', or put `tf.keras.layers.Discretization` before it"
            raise unmet("A feature", required, dtype.name, of, TypeError)
        check_kind(self._tables[self._features[name].table], dtype, of)
        # Only Keras, when it builds a model, passes floats.
        padded = self.pad_key is not None and dense and rank == 2 and not dtype.is_floating
        if padded and not self._may_be_padded(dtype):
            required = "have the same kind (integer or string) as every feature of shape "
            required += "[batch, hotness]; pass other features as RaggedTensors"
            raise unmet("`pad_key`", required, f"pad_key={self.pad_key!r}, {dtype.name}", of)

    def _may_be_padded(self, dtype):
        of_its_kind = isinstance(self.pad_key, str) == (dtype == tf.string)
        return self.pad_key is not None and of_its_kind

    def _structure(self, values):
        return dict(zip(self._features, values, strict=True)) if self._is_dict else list(values)

    def compute_mask(self, inputs, mask=None):
        """Masks like the output; None for features that are combined."""
        if not self.supports_masking:
            return None
        masks = []
        for name, value in self._given(inputs).items():
            value = value if hasattr(value, "dtype") else tf.convert_to_tensor(value)
            masked = self._features[name].combiner is None
            masked = masked and self._may_be_padded(tf.as_dtype(value.dtype))
            masks.append(mask_of(value, self.pad_key) if masked else None)
        return self._structure(masks)

    def compute_output_shape(self, input_shape):
        shapes = self._given(input_shape).items()
        return self._structure(self._shape(name, shape) for name, shape in shapes)

    def _shape(self, name, shape):
        feature = self._features[name]
        return (*tuple(shape)[: None if feature.combiner is None else 1], feature.dim)

    def compute_output_spec(self, inputs, training=None):
        specs = []
        for name, value in self._given(inputs).items():
            self._check(name, value)
            shape = self._shape(name, value.shape)
            ragged = self._features[name].combiner is None and _is_composite(value)
            specs.append(tf.keras.KerasTensor(shape, dtype=self.compute_dtype, ragged=ragged))
        return self._structure(specs)

    def get_config(self):
        features, dtypes = self._features.values(), ("key_dtype", "dtype")
        options: dict[str, dict[str, Any]] = {name: {} for name in self._table_options}
        for name, given in self._table_options.items():
            for key, value in given.items():
                value = tf.as_dtype(value) if key in dtypes and value is not None else value
                options[name][key] = in_config(key, option_config(value))
        return {
            **super().get_config(),
            "embedding_dims": self._structure(feature.dim for feature in features),
            "tables": self._structure(feature.table for feature in features),
            "combiners": self._structure(feature.combiner for feature in features),
            "table_options": options,
        }


def _by_feature(argument, values, features, default):
    """A dictionary by feature: names of a dictionary, positions of a list."""
    if values is None and features is not None:
        return default
    fits = not isinstance(values, str) and hasattr(values, "__len__") and len(values) > 0
    require(fits, argument, "a dictionary or a list with an entry for each feature", values)
    by_feature = dict(values) if isinstance(values, Mapping) else dict(enumerate(values))
    if features is None:
        return by_feature
    unknown = [name for name in by_feature if name not in features]
    fits = not unknown and (isinstance(values, Mapping) or len(by_feature) == len(features))
    require(fits, argument, f"given for each feature of {list(features)}", values)
    return {name: by_feature.get(name, default[name]) for name in features}


def _is_composite(values):
    """Whether a feature, or Keras 3's symbol for one, is ragged or sparse."""
    composite = isinstance(values, (tf.RaggedTensor, tf.SparseTensor))
    return composite or any(getattr(values, kind, False) for kind in ("sparse", "ragged"))
