"""`linear_model` over columns with keys: their weights are rows of a hash table.

Stock columns and the bias are TensorFlow's. A column with keys adds the sum of its keys' rows. They
have `units` elements, initially 0.
"""

from __future__ import annotations

import re
from typing import Any

import tensorflow as tf
from tensorflow.python.feature_column import feature_column as old

from sok_like.feature_column.categorical import table_column
from sok_like.feature_column.input_layer import _collections, _require_graph
from sok_like.feature_column.lookup import GraphInputs, ids_and_weights
from sok_like.group_embedding.get_embedding_variable import get_embedding_variable
from sok_like.group_embedding.lookup_sparse import group_embedding_lookup_sparse

v1 = tf.compat.v1
_stock = v1.feature_column.linear_model


def linear_model(
    features: dict,
    feature_columns: Any,
    units: int = 1,
    sparse_combiner: str = "sum",
    weight_collections: Any = None,
    trainable: bool = True,
    cols_to_vars: dict | None = None,
    *,
    training: bool = True,
    gradient_scale: str = "auto",
) -> tf.Tensor:
    """`tf.compat.v1.feature_column.linear_model`, also over columns with keys.

    All columns with keys are looked up as one group. Their weights start from 0, or from the
    initializer of the column's `ev_option`.

    Args:
        features, feature_columns, units, weight_collections, trainable, cols_to_vars: As in
            TensorFlow.
        sparse_combiner: "sum", "mean" or "sqrtn".
        training, gradient_scale: As in `sok.feature_column.input_layer`.

    Returns:
        float32 `[batch, units]`.

    Raises:
        RuntimeError: called eagerly or in a tf.function.
        ValueError: no columns, or the variable scope forbids a variable.
    """
    columns = sorted(old._normalize_feature_columns(feature_columns), key=lambda c: c.name)
    keyed = [column for column in columns if table_column(column) is not None]
    others = [column for column in columns if table_column(column) is None]
    if not keyed:
        return _stock(
            *(features, others, units, sparse_combiner, weight_collections, trainable, cols_to_vars)
        )
    _require_graph("linear_model", "DenseFeatures")
    bias_variables: dict[Any, Any] = {} if cols_to_vars is None else cols_to_vars
    with v1.variable_scope(None, "linear_model", list(features.values())):
        parts = []
        if others:  # with the bias
            stock = (units, sparse_combiner, weight_collections, trainable, bias_variables)
            parts.append(_stock(features, others, *stock))
        else:
            collections = _collections(weight_collections)
            options = {"trainable": trainable, "collections": collections}
            zeros = v1.zeros_initializer()
            bias = v1.get_variable("bias_weights", [units], initializer=zeros, **options)
            bias_variables["bias"] = [bias]
        tables = [_weights(column, units, trainable) for column in keyed]
        bias_variables.update({c: [t] for c, t in zip(keyed, tables, strict=True)})
        inputs = GraphInputs(features)
        pairs = [ids_and_weights(column, inputs) for column in keyed]
        parts += group_embedding_lookup_sparse(
            tables,
            [ids for ids, _ in pairs],
            [sparse_combiner] * len(keyed),
            sp_weights=[weights for _, weights in pairs],
            name=re.sub(r"[^a-zA-Z0-9.]", "_", v1.get_variable_scope().name),
            training=training,
            gradient_scale=gradient_scale,
        )
        total = tf.add_n(parts)
        return total if others else total + bias


def _weights(column, units, trainable):
    keys = table_column(column)
    with v1.variable_scope(None, column.name), v1.name_scope(None):
        return get_embedding_variable(
            "weights",
            units,
            key_dtype=keys.key_dtype,
            initializer=v1.zeros_initializer(),
            trainable=trainable,
            ev_option=keys.ev_option,
        )
