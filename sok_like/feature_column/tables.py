"""Tables of columns in a graph, shared under variable scopes as `tf.compat.v1.get_variable` does.

A graph owns its tables: they are found in one of its collections by the name of their variable
scope, and die with it.
"""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from sok_like.variable import EmbeddingVariable

v1 = tf.compat.v1
_COLLECTION = "sok_like_tables"  # {name: EmbeddingVariable}
WEIGHTS = "embedding_weights"  # what TensorFlow calls a column's variable


def graph_weights(column: Any, weight_collections: list | None, trainable: bool) -> Any:
    """The table of an embedding column in the present variable scope, made where there is none.

    A shared one is found by its name anywhere in the graph, as TensorFlow's are.

    Raises:
        ValueError: what the variable scope's `reuse` forbids, or a name shared by other tables.
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
        table = _graph_table(column, collections, column.trainable and trainable)
    if column.shared_name is not None:
        v1.add_to_collection(column.shared_name, table)
    return table


def make_table(column: Any, name: str, trainable: bool) -> EmbeddingVariable:
    """An EmbeddingVariable for a column with keys."""
    return EmbeddingVariable(
        column.dimension,
        name=name,
        key_dtype=column.keys_column.key_dtype,
        initializer=column.initializer,
        trainable=trainable,
    )


def _graph_table(column, collections, trainable):
    scope = v1.get_variable_scope()
    name = f"{scope.name}/{WEIGHTS}" if scope.name else WEIGHTS
    held = v1.get_collection_ref(_COLLECTION)
    if not held:
        held.append({})
    (tables,) = held
    if name in tables:
        if not scope.reuse:
            raise ValueError(
                f"Table '{name}' must not exist yet, or be reused: v1.variable_scope(..., "
                "reuse=True) or reuse=v1.AUTO_REUSE. Received: a table of this name in the graph"
            )
        _check_shared(column, tables[name])
        return tables[name]
    if scope.reuse is True:
        raise ValueError(
            f"Table '{name}' must exist where reuse=True. Received: a graph without it"
        )
    with v1.name_scope(None):  # the variable scope is in the name already
        table = make_table(column, name, trainable)
    v1.add_to_collections([c for c in collections if c != v1.GraphKeys.GLOBAL_VARIABLES], table)
    tables[name] = table
    return table


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
