"""`input_layer` and `sequence_input_layer`: the functions of TF1, with groups looked up at once.

Names of scopes and variables are those of `tf.compat.v1.feature_column.input_layer`, so that its
checkpoints of ordinary variables fit. Outside of a graph nothing would own the tables from one
call to the next; there the layer `DenseFeatures` does.
"""

from __future__ import annotations

from typing import Any

import tensorflow as tf
from tensorflow.python.feature_column import feature_column_v2 as fc

from sok_like.feature_column.columns import is_fused
from sok_like.feature_column.lookup import GraphInputs, check_columns, embeddings, flat, sequences
from sok_like.feature_column.tables import graph_weights

v1 = tf.compat.v1


def input_layer(
    features: dict,
    feature_columns: Any,
    weight_collections: Any = None,
    trainable: bool = True,
    cols_to_vars: dict | None = None,
    cols_to_output_tensors: dict | None = None,
    *,
    training: bool = True,
    gradient_scale: str = "auto",
) -> tf.Tensor:
    """`tf.compat.v1.feature_column.input_layer`, with one fused lookup for each group of columns.

    Args:
        features: Feature by name: dense `[batch]` or `[batch, hotness]`, a SparseTensor, or a
            RaggedTensor, which columns with keys take as it is and others as a SparseTensor.
        feature_columns: Dense columns of this package and of TensorFlow.
        weight_collections: Names of collections that variables are added to.
        trainable: Whether variables are trainable.
        cols_to_vars: Is filled with a list of variables a column.
        cols_to_output_tensors: Is filled with `[batch, width]` a column.
        training: False reads initial rows of unseen keys and inserts none.
        gradient_scale: "auto", "sum" or "mean" over ranks of a row's gradients, see
            `sok_like.lookup.hash_lookup.lookup`.

    Returns:
        float32 `[batch, sum of widths]`: the columns sorted by name.

    Raises:
        RuntimeError: executing eagerly or within a tf.function.
        ValueError: columns that are none of these, or a variable scope that forbids a variable.
    """
    columns = check_columns(feature_columns, in_graph=True)
    _require_graph("input_layer", "DenseFeatures")
    collections = _collections(weight_collections)
    with v1.variable_scope(None, "input_layer", list(features.values())):
        inputs = GraphInputs(features)
        tables, tensors = {}, {}
        for column in columns:
            with v1.variable_scope(None, getattr(column, "_var_scope_name", column.name)) as scope:
                if is_fused(column):
                    tables[column] = graph_weights(column, collections, trainable)
                else:
                    tensors[column] = column._get_dense_tensor(
                        inputs, weight_collections=collections, trainable=trainable
                    )
                if cols_to_vars is not None:
                    cols_to_vars[column] = v1.get_collection(
                        v1.GraphKeys.GLOBAL_VARIABLES, scope.name
                    )
        found = embeddings(
            list(tables), tables, inputs, training=training, gradient_scale=gradient_scale
        )
        tensors.update(found)
        outputs = [flat(column, tensors[column]) for column in columns]
        if cols_to_output_tensors is not None:
            cols_to_output_tensors.update(zip(columns, outputs, strict=True))
        fc._verify_static_batch_size_equality(outputs, columns)
        return tf.concat(outputs, 1)


def sequence_input_layer(
    features: dict,
    feature_columns: Any,
    weight_collections: Any = None,
    trainable: bool = True,
    *,
    training: bool = True,
    gradient_scale: str = "auto",
) -> tuple[tf.Tensor, tf.Tensor]:
    """Rows of sequence columns in their places, nothing combined; a fused lookup a group.

    Args:
        feature_columns: Embedding columns of this package over sequence categorical columns.
        features, weight_collections, trainable, training, gradient_scale: As in `input_layer`.

    Returns:
        float32 `[batch, T, sum of dimensions]`, the columns sorted by name and zeros where a
        sequence has ended, and its length, int64 `[batch]`.

    Raises:
        RuntimeError: executing eagerly or within a tf.function.
        ValueError: columns that are none of these.
        tf.errors.InvalidArgumentError: features of different lengths.
    """
    columns = check_columns(feature_columns, in_graph=True, sequence=True)
    _require_graph("sequence_input_layer", "SequenceFeatures")
    collections = _collections(weight_collections)
    with v1.variable_scope(None, "sequence_input_layer", list(features.values())):
        tables = {}
        for column in columns:
            with v1.variable_scope(None, column._var_scope_name):
                tables[column] = graph_weights(column, collections, trainable)
        return sequences(
            columns,
            tables,
            GraphInputs(features),
            training=training,
            gradient_scale=gradient_scale,
        )


def _collections(weight_collections):
    collections = list(weight_collections or [])
    for name in (v1.GraphKeys.GLOBAL_VARIABLES, v1.GraphKeys.MODEL_VARIABLES):
        if name not in collections:
            collections.append(name)
    return collections


def _require_graph(function, layer):
    # Within a tf.function of a TF2 program a call would make its tables anew with every trace.
    if v1.executing_eagerly_outside_functions():
        raise RuntimeError(
            f"sok.feature_column.{function} must be called in a tf.compat.v1 graph; eagerly and in "
            f"tf.functions make a layer once, sok.feature_column.{layer}(columns), and call it. "
            "Received: a call outside of a graph"
        )
