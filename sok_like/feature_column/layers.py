"""`DenseFeatures` and `SequenceFeatures`: layers that own the tables of feature columns.

They are for eager programs, tf.functions and Keras models, and replace Keras' own, which Keras 3
no longer has. Make a layer once and call it many times; its weights include the columns' tables.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import tensorflow as tf
from tensorflow.python.feature_column import feature_column_v2 as fc
from tensorflow.python.feature_column import serialization

from sok_like.feature_column.categorical import EmbeddingCategoricalColumn, check_features
from sok_like.feature_column.columns import WEIGHTS, GroupEmbeddingColumn, is_fused, table_options
from sok_like.feature_column.lookup import (
    Call,
    LayerInputs,
    check_columns,
    embeddings,
    flat,
    sequences,
)
from sok_like.lookup.dense_lookup import as_tf_table
from sok_like.lookup.table_layer import freeze_tables, keras_arguments
from sok_like.lookup.training_flag import by_training
from sok_like.runtime.ranks.lookup_options import check_gradient_scale
from sok_like.table.variable import EmbeddingVariable

_CLASSES = {cls.__name__: cls for cls in (EmbeddingCategoricalColumn, GroupEmbeddingColumn)}


class _State(fc.StateManager):
    """Variables and lookup tables of stock columns, held by a layer."""

    def __init__(self, layer):
        self._layer = layer
        self._variables = {}
        self._resources = {}

    def create_variable(
        self,
        feature_column,
        name,
        shape,
        dtype=None,
        trainable=True,
        use_resource=True,
        initializer=None,
    ):
        weight = self._layer.add_weight(
            name=f"{feature_column.name}_{name}",
            shape=tuple(shape),
            dtype=(dtype or tf.float32).name,
            initializer=initializer,
            trainable=trainable,
        )
        self._variables[feature_column, name] = weight
        setattr(self._layer, f"_stock_{len(self._variables)}", weight)  # for tf.train.Checkpoint
        return as_tf_table(weight)

    def get_variable(self, feature_column, name):
        return as_tf_table(self._variables[feature_column, name])

    def add_resource(self, feature_column, name, resource):
        self._resources[feature_column, name] = resource

    def has_resource(self, feature_column, name):
        return (feature_column, name) in self._resources

    def get_resource(self, feature_column, name):
        return self._resources[feature_column, name]


class _Columns:
    """The sorted columns of a layer, and its hash tables by key. It is opaque to Keras."""

    def __init__(self, feature_columns, sequence):
        self.all = check_columns(feature_columns, in_graph=False, sequence=sequence)
        self.fused = [column for column in self.all if is_fused(column)]
        self.stock = [column for column in self.all if not is_fused(column)]
        self.width = sum(column.variable_shape.num_elements() for column in self.all)
        self.tables: dict[str, EmbeddingVariable] = {}

    def table_keys(self):
        """Maps each table's name to one of its columns."""
        return {column.shared_name or column.name: column for column in reversed(self.fused)}


class _ColumnsLayer(tf.keras.layers.Layer):
    _sequence = False

    def __init__(self, feature_columns: Any, *, gradient_scale: str = "auto", **kwargs: Any):
        super().__init__(
            autocast=False, **keras_arguments(kwargs)
        )  # Keras would cast the weights of keys
        self.gradient_scale = check_gradient_scale(gradient_scale)
        self.supports_jit = False  # XLA cannot compile the tables' ops
        self._columns = _Columns(feature_columns, self._sequence)
        self._state = _State(self)
        tables: dict[str, EmbeddingVariable] = {}
        for key, column in sorted(self._columns.table_keys().items()):
            if column.keys_column is None:
                column.create_state(self._state)
                continue
            variable = EmbeddingVariable(
                name=f"{self.name}/{key}/{WEIGHTS}",
                trainable=column.trainable,
                **table_options(column),
            )
            setattr(self, f"_table_{len(tables)}", variable.as_weight())
            tables[key] = variable
        self._columns.tables = tables
        for column in self._columns.stock:
            column.create_state(self._state)
        freeze_tables(self)
        self.built = True

    @property
    def tables(self) -> dict[str, EmbeddingVariable]:
        """The hash tables, by the name of their column or their shared name."""
        return dict(self._columns.tables)

    def build(self, input_shape=None):
        self.built = True

    def _tables(self):
        """The table of each fused column."""
        firsts = self._columns.table_keys()
        tables = {}
        for column in self._columns.fused:
            key = column.shared_name or column.name
            if key in self._columns.tables:
                tables[column] = self._columns.tables[key]
            else:
                tables[column] = self._state.get_variable(firsts[key], WEIGHTS)
        return tables

    def _call(self, features, training):
        return Call(self._tables(), self._inputs(features), training, self.gradient_scale)

    def _inputs(self, features):
        if not isinstance(features, Mapping):
            raise ValueError(
                "The input must be a dictionary of features by name. "
                f"Received: {features!r} (layer '{self.name}')"
            )
        if not tf.executing_eagerly():  # a graph is being built, also when tf_keras builds a model
            check_features(self._columns.all, features, self.name)
        return LayerInputs(dict(features), self._state)

    def _shapes(self, features):
        """Shapes of symbolic features, by name; Keras 3 does not run the columns on them."""
        if not isinstance(features, Mapping):
            self._inputs(features)  # raises
        check_features(self._columns.all, features, self.name)
        return {key: value.shape for key, value in features.items()}

    def _batch(self, input_shape):
        shapes = [shape for shape in input_shape.values() if shape is not None and len(shape)]
        return shapes[0][0] if shapes else None

    def get_config(self):
        columns = serialization.serialize_feature_columns(self._columns.all)
        return {
            **super().get_config(),
            "feature_columns": columns,
            "gradient_scale": self.gradient_scale,
        }

    @classmethod
    def from_config(cls, config):
        columns = serialization.deserialize_feature_columns(config["feature_columns"], _CLASSES)
        return cls(**{**config, "feature_columns": columns})


@tf.keras.utils.register_keras_serializable("sok_like")
class DenseFeatures(_ColumnsLayer):
    """Dense feature columns as one layer; each group is looked up in one fused call.

    Args:
        feature_columns: Dense columns of this package and of TensorFlow.
        gradient_scale: "auto", "sum" or "mean" over ranks of a row's gradients, see
            docs/semantics/ranks.md.
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
            outputs = embeddings(self._columns.fused, call)
            for column in self._columns.stock:
                outputs[column] = column.get_dense_tensor(call.inputs, self._state)
            return tf.concat([flat(column, outputs[column]) for column in self._columns.all], 1)

        return tf.cast(by_training(training, tensors), self.compute_dtype)

    def compute_output_shape(self, input_shape):
        return (self._batch(input_shape), self._columns.width)

    def compute_output_spec(self, features, training=None):
        import keras

        shape = self.compute_output_shape(self._shapes(features))
        return keras.KerasTensor(shape, dtype=self.compute_dtype)


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
        def found(training):
            return sequences(self._columns.all, self._call(features, training))

        rows, lengths = by_training(training, found)
        return tf.cast(rows, self.compute_dtype), lengths

    def compute_output_shape(self, input_shape):
        batch = self._batch(input_shape)
        return (batch, None, self._columns.width), (batch,)

    def compute_output_spec(self, features, training=None):
        import keras

        rows, lengths = self.compute_output_shape(self._shapes(features))
        return (
            keras.KerasTensor(rows, dtype=self.compute_dtype),
            keras.KerasTensor(lengths, dtype="int64"),
        )
