"""`DenseFeatures` and `SequenceFeatures`: layers that own the tables of feature columns.

They are for eager programs, tf.functions and Keras models, and replace Keras' own, which Keras 3
no longer has. Make a layer once and call it many times; its weights include the columns' tables.
"""

import types
from collections.abc import Mapping
from typing import Any

import tensorflow as tf
from tensorflow.python.feature_column import feature_column_v2 as fc
from tensorflow.python.feature_column import serialization

from sok_like.feature_column import lookup
from sok_like.feature_column.categorical import EmbeddingCategoricalColumn, check_features
from sok_like.feature_column.columns import (
    WEIGHTS,
    GroupEmbeddingColumn,
    is_fused,
    table_options,
    table_shape,
    unfit,
)
from sok_like.lookup.dense_lookup import as_tf_table
from sok_like.lookup.keras_call import by_training
from sok_like.lookup.table_layer import TablesLayer
from sok_like.runtime.checks import require
from sok_like.runtime.ranks.lookup_options import check_gradient_scale
from sok_like.table.variable import EmbeddingVariable

_CLASSES = {cls.__name__: cls for cls in (EmbeddingCategoricalColumn, GroupEmbeddingColumn)}


class _State(fc._StateManagerImpl):
    """Variables of stock columns, held by a layer; the base class keeps their lookup tables."""

    of_sok_like = True  # which columns that share a table require

    def __init__(self, layer):
        # Given a layer, it would add weights as Keras 2 does.
        super().__init__(None, trainable=True)
        self._owner, self._variables = layer, {}

    def create_variable(self, feature_column, name, shape, dtype=None, trainable=True, **options):
        key = self._key(feature_column, name)
        if key in self._variables:  # of another column that shares the table
            return as_tf_table(self._variables[key])
        weight = self._owner.add_weight(
            name=f"{feature_column.name}_{name}",
            shape=tuple(shape),
            dtype=(dtype or tf.float32).name,
            initializer=options.get("initializer"),
            trainable=trainable,
        )
        self._variables[key] = weight
        setattr(self._owner, f"_stock_{len(self._variables)}", weight)  # for tf.train.Checkpoint
        return as_tf_table(weight)

    def get_variable(self, feature_column, name):
        return as_tf_table(self._variables[self._key(feature_column, name)])

    def _key(self, column, name):
        return getattr(column, "shared_name", None) or column, name


class _ColumnsLayer(TablesLayer):
    _sequence = False
    _arguments = ("gradient_scale",)

    def __init__(self, feature_columns: Any, *, gradient_scale: str = "auto", **kwargs: Any):
        # Keras would cast the weights of keys.
        super().__init__(autocast=False, **kwargs)
        self.gradient_scale = check_gradient_scale(gradient_scale)
        every = lookup.check_columns(feature_columns, in_graph=False, sequence=self._sequence)
        self._state = _State(self)
        # Opaque to Keras: the columns, sorted, and the hash tables by their shared name or their
        # column's.
        self._columns = types.SimpleNamespace(every=every, tables={})
        fused: dict[str, Any] = {}  # one of the columns of each table, by its name
        sharing: dict[str, Any] = {}
        for column in every:
            if is_fused(column):
                fused.setdefault(column._var_scope_name, column)
            if isinstance(column, GroupEmbeddingColumn) and column.shared_name is not None:
                first = sharing.setdefault(column.shared_name, column)
                if table_shape(first) != table_shape(column):
                    raise unfit(column, f"{table_shape(first)} for column '{first.name}'")
        for key, column in sorted(fused.items()):
            if column.keys_column is None:
                column.create_state(self._state)
                continue
            name, options = f"{self.name}/{key}/{WEIGHTS}", table_options(column)
            table = EmbeddingVariable(name=name, trainable=column.trainable, **options)
            setattr(self, f"_table_{len(self._columns.tables)}", table.as_weight())
            self._columns.tables[key] = table
        for column in every:
            if not is_fused(column):
                column.create_state(self._state)
        self._freeze_tables()
        self.built = True

    @property
    def tables(self) -> dict[str, EmbeddingVariable]:
        """The hash tables, by the name of their column or their shared name."""
        return dict(self._columns.tables)

    def _call(self, features, training):
        # A graph is also built when tf_keras builds a model.
        self._check(features, in_graph=not tf.executing_eagerly())
        tables = {}
        for column in filter(is_fused, self._columns.every):
            table = self._columns.tables.get(column._var_scope_name)
            if table is None:  # a dense one
                table = self._state.get_variable(column, WEIGHTS)
            tables[column] = table
        inputs = lookup.LayerInputs(dict(features), self._state)
        return lookup.Call(tables, inputs, training, self.gradient_scale)

    def _check(self, features, in_graph):
        is_named, of = isinstance(features, Mapping), f"layer '{self.name}'"
        require(is_named, "features", "a dictionary of features by name", features, of)
        if in_graph:
            check_features(self._columns.every, features, self.name)

    def compute_output_shape(self, input_shape):
        shapes = [shape for shape in input_shape.values() if shape is not None and len(shape)]
        batch = shapes[0][0] if shapes else None
        width = sum(column.variable_shape.num_elements() for column in self._columns.every)
        return ((batch, None, width), (batch,)) if self._sequence else (batch, width)

    def compute_output_spec(self, features, training=None):
        self._check(features, in_graph=True)  # Keras 3 does not run columns on symbols
        shape = self.compute_output_shape({key: value.shape for key, value in features.items()})
        symbol, dtype = tf.keras.KerasTensor, self.compute_dtype
        if not self._sequence:
            return symbol(shape, dtype=dtype)
        return symbol(shape[0], dtype=dtype), symbol(shape[1], dtype="int64")

    def get_config(self):
        columns = serialization.serialize_feature_columns(self._columns.every)
        return {**super().get_config(), "feature_columns": columns}

    @classmethod
    def from_config(cls, config):
        columns = serialization.deserialize_feature_columns(config["feature_columns"], _CLASSES)
        return cls(**{**config, "feature_columns": columns})


@tf.keras.utils.register_keras_serializable("sok_like")
class DenseFeatures(_ColumnsLayer):
    """Dense feature columns as one layer; each group is looked up in one fused call.

    Args:
        feature_columns: Dense columns of this package and of TensorFlow.
        gradient_scale: As in `sok.GroupEmbedding`.
        **kwargs: Keras' own: `name`, `dtype`, `trainable`. The name is part of the tables' names,
            on which initial rows depend.

    Input shape:
        A dictionary of features by name: `[batch]`, `[batch, hotness]`, a SparseTensor or a
        RaggedTensor. Columns with keys read RaggedTensors directly, others as SparseTensors.

    Output shape:
        `[batch, sum of dimensions]` in the layer's compute dtype: the columns sorted by name.

    Raises:
        ValueError: a column is not dense, or the input is not a dictionary.
        RuntimeError: `sok.Init` has not been called.
    """

    def call(self, features, training=None):
        def tensors(training):
            call = self._call(features, training)
            outputs = call.embeddings()
            flat = []
            for column in self._columns.every:
                if column not in outputs:
                    outputs[column] = column.get_dense_tensor(call.inputs, self._state)
                flat.append(lookup.flat(column, outputs[column]))
            return tf.concat(flat, 1)

        return tf.cast(by_training(training, tensors), self.compute_dtype)


@tf.keras.utils.register_keras_serializable("sok_like")
class SequenceFeatures(_ColumnsLayer):
    """Embedding columns over sequences: one row per position, without a combiner.

    Args:
        feature_columns: Embedding columns of this package over sequence categorical columns.
        gradient_scale, **kwargs: As in `DenseFeatures`.

    Input shape:
        As in `DenseFeatures`.

    Output shape:
        `[batch, T, sum of dimensions]` in the layer's compute dtype, the columns sorted by name,
        padded with zeros; and the sequence lengths, int64 `[batch]`.

    Raises:
        ValueError: a column is not an embedding column over sequences, or the input is not a
            dictionary.
        RuntimeError: `sok.Init` has not been called.
        tf.errors.InvalidArgumentError: features have different lengths.
    """

    _sequence = True

    def call(self, features, training=None):
        def tensors(training):
            return self._call(features, training).sequences()

        rows, lengths = by_training(training, tensors)
        return tf.cast(rows, self.compute_dtype), lengths
