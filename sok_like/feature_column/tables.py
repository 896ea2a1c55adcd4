"""Tables of embedding columns, found or made in the graph's current variable scope."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from sok_like.group_embedding.get_embedding_variable import get_embedding_variable
from sok_like.table.variable import EmbeddingVariable

v1 = tf.compat.v1
WEIGHTS = "embedding_weights"  # TensorFlow's name of a column's variable


def graph_weights(column: Any, weight_collections: list | None, trainable: bool) -> Any:
    """The table of an embedding column in the current variable scope; made if it is missing.

    A shared table is found by its name anywhere in the graph, as in TensorFlow.
    """
    collections = list(weight_collections or [])
    if v1.GraphKeys.GLOBAL_VARIABLES not in collections:
        collections.append(v1.GraphKeys.GLOBAL_VARIABLES)
    if column.shared_name is not None:
        for table in v1.get_collection(column.shared_name):
            _check_shared(column, table)
            return table
    if column.keys_column is None:
        table = v1.get_variable(
            WEIGHTS,
            [column.categorical_column._num_buckets, column.dimension],
            tf.float32,
            column.initializer,
            trainable=column.trainable and trainable,
            collections=collections,
        )
    else:
        with v1.name_scope(None):  # the name already contains the variable scope
            is_trainable = column.trainable and trainable
            table = get_embedding_variable(WEIGHTS, trainable=is_trainable, **table_options(column))
        for collection in collections:
            if not any(held is table for held in v1.get_collection(collection)):
                v1.add_to_collection(collection, table)
    if column.shared_name is not None:
        v1.add_to_collection(column.shared_name, table)
    return table


def table_options(column: Any) -> dict:
    """The arguments of the EmbeddingVariable of a column with keys, except its name."""
    keys = column.keys_column
    in_option = initializer_of(keys.ev_option) is not None
    return {
        "embedding_dim": column.dimension,
        "key_dtype": keys.key_dtype,
        "initializer": None if in_option else column.initializer,
        "ev_option": keys.ev_option,
    }


def initializer_of(ev_option: Any) -> Any:
    """The initializer of an EmbeddingVariableOption, or None."""
    init_option = getattr(ev_option, "init_option", None)
    return None if init_option is None else init_option.initializer


def _check_shared(column, table):
    wanted = column.dimension
    if column.keys_column is None:
        fits = table.shape == [column.categorical_column._num_buckets, wanted]
    else:
        fits = isinstance(table, EmbeddingVariable) and table.dim == wanted
    if not fits:
        raise ValueError(
            f"The table of column '{column.name}' must have rows of {wanted} floats for the "
            f"columns that share it. Received: {table!r}"
        )
