"""Group lookups: many tables in one call, and one exchange for all their EmbeddingVariables.

params  [EV a, variable b, EV c, EV a]
            |        |       |     |
            |   gather and   |     |          tf.Variable: each process by itself
            |   combine      |     |
            +--------|-------+-----+--> sok_like.lookup: two collectives forward and
            |        |       |     |    one back, or one fused op if there is one process
outputs [ [B, D] , [B, D], [B, D], [B, D] ]
"""

import sys
from typing import Any

import tensorflow as tf

from sok_like.group_embedding import arguments
from sok_like.group_embedding.arguments import Ids, table_name
from sok_like.lookup.dense_lookup import lookup_rows
from sok_like.lookup.hash_lookup import HashFeature, lookup
from sok_like.lookup.ids import FlatIds
from sok_like.lookup.keras_call import by_training, training_of_call
from sok_like.runtime.checks import check_integer, unmet, wrong_argument
from sok_like.table.keys import as_keys
from sok_like.table.variable import EmbeddingVariable


def group_embedding_lookup_sparse(
    params: Any,
    sp_ids: Any,
    combiners: Any,
    partition_strategy: str = "mod",
    sp_weights: Any = None,
    name: str | None = None,
    *,
    is_sequence: bool = False,
    params_num_per_group: int = sys.maxsize,
    training: bool | None = None,
    gradient_scale: str = "auto",
    wire_dtype: Any = None,
) -> list[tf.Tensor]:
    """`tf.nn.embedding_lookup_sparse` of many tables at once.

    Args:
        params: A table or a list of them; sok.EmbeddingVariables and tf.Variables (replicated, one
            row per id) may be mixed. A table may occur several times; its gradients are added.
        sp_ids: Integers: a list with one item per table, a `tf.RaggedTensor` `[batch, None]` or a
            `tf.SparseTensor` `[batch, max_hotness]`, in any order; or one `tf.RaggedTensor`
            `[num_tables, batch, None]` of ragged_rank 2 for all tables, which takes less time to
            pass from Python. The batch may differ between tables.
        combiners: List of "mean", "sum" or "sqrtn", or one for all; None: "mean", with a warning.
        partition_strategy: Must be "mod".
        sp_weights: None, or floats of the kind and shape of the ids; for a list of ids a list with
            one item per table, which may be None. A mean is divided by the sum of the weights,
            sqrtn by the root of the sum of their squares. They have a gradient.
        name: Name of the group's collectives, the same on all ranks.
        is_sequence: True combines nothing: rows stay in the positions of their ids, and `combiners`
            is only checked.
        params_num_per_group: A positive integer, DeepRec's number of tables per op; ignored. The op
            here works on its tables in parallel, whatever the number.
        training: False reads initial rows of missing keys without inserting them. None: the flag of
            the Keras call in progress; outside of one, and without a flag, True.
        gradient_scale, wire_dtype: As in `sok.GroupEmbedding`; for EmbeddingVariables only.

    Returns:
        A list of `[batch, embedding_dim]` in the order of `params`; an empty sample, or one whose
        divisor is 0, gives zeros. With `is_sequence` `[batch, T, embedding_dim]`, zeros where there
        is no id; T is a SparseTensor's second dimension or a RaggedTensor's longest row.

    Raises:
        ValueError: an argument is of another kind, or lists differ in length.
        TypeError: an item is not a table or is a PartitionedVariable of several parts, ids are not
            integers, or `training` is neither a bool nor None.
        tf.errors.InvalidArgumentError: an id is outside a tf.Variable, or weights are not at the
            positions of the ids.
    """
    tables = arguments.tables(params)
    combiners = arguments.combiners(combiners, len(tables))
    arguments.check_partition_strategy(partition_strategy)
    name = name or "group_embedding_lookup_sparse"
    arguments.check_mode(training, gradient_scale, wire_dtype, name)
    if sp_weights is not None and is_sequence:
        required = "None if is_sequence is True: nothing is combined"
        raise wrong_argument("sp_weights", required, sp_weights)
    check_integer("params_num_per_group", params_num_per_group)
    with tf.name_scope(name):
        ids = arguments.ids_of_tables(sp_ids, sp_weights, tables, combined=not is_sequence)

        def feature(i):
            ragged, weights, _ = ids[i]
            combined = () if is_sequence else (combiners[i], ragged.row_splits, weights)
            return HashFeature(tables[i], as_keys(ragged.values), *combined)

        def dense_rows(i):
            (ragged, weights, _), of = ids[i], table_name(tables[i])
            if is_sequence:
                return lookup_rows(tables[i], ragged, None, None, of).values
            weights = None if weights is None else ragged.with_values(weights)
            return lookup_rows(tables[i], ragged, combiners[i], weights, of)

        options = {"gradient_scale": gradient_scale, "wire_dtype": wire_dtype, "name": name}
        rows_of_tables = _look_up(tables, feature, dense_rows, training, options)
        if is_sequence:
            return list(map(_as_sequence, rows_of_tables, ids))
        for rows, i in zip(rows_of_tables, ids, strict=True):
            rows.set_shape([i.batch, rows.shape[-1]])
        return rows_of_tables


def group_embedding_lookup(
    params: Any,
    ids: Any,
    partition_strategy: str = "mod",
    name: str | None = None,
    *,
    training: bool | None = None,
    gradient_scale: str = "auto",
    wire_dtype: Any = None,
) -> list[tf.Tensor]:
    """`tf.nn.embedding_lookup` of many tables at once: one row per id.

    Args:
        params, partition_strategy, name, training, gradient_scale, wire_dtype: As in
            `group_embedding_lookup_sparse`.
        ids: List with one item per table: integers of any shape.

    Returns:
        One tensor per table, with the shape of its ids plus a last axis `embedding_dim`.

    Raises:
        ValueError, TypeError, tf.errors.InvalidArgumentError: As there; also if ids are not dense.
    """
    tables = arguments.tables(params)
    ids = arguments.one_each("ids", ids, len(tables))
    arguments.check_partition_strategy(partition_strategy)
    name = name or "group_embedding_lookup"
    arguments.check_mode(training, gradient_scale, wire_dtype, name)
    for i, table in zip(ids, tables, strict=True):
        if isinstance(i, (tf.SparseTensor, tf.RaggedTensor)):
            required = "be dense; sok.group_embedding_lookup_sparse takes others"
            raise unmet("`ids`", required, f"{i!r}", f"table '{table_name(table)}'", TypeError)
    with tf.name_scope(name):
        ids = [tf.convert_to_tensor(i) for i in ids]
        for i, table in zip(ids, tables, strict=True):
            arguments.check_integers("ids", i, table_name(table))
        flat = [FlatIds(i, None, hashed=True) for i in ids]

        def feature(i):
            return HashFeature(tables[i], flat[i].ids)

        def dense_rows(i):
            return lookup_rows(tables[i], flat[i].ids, None, None, table_name(tables[i]))

        options = {"gradient_scale": gradient_scale, "wire_dtype": wire_dtype, "name": name}
        rows_of_tables = _look_up(tables, feature, dense_rows, training, options)
        return [f.restore(rows) for f, rows in zip(flat, rows_of_tables, strict=True)]


def _look_up(tables, feature, dense_rows, training, options):
    """Rows by table: of hash tables by one lookup of features, of each tf.Variable by itself."""
    hashed = [i for i, table in enumerate(tables) if isinstance(table, EmbeddingVariable)]
    features = list(map(feature, hashed))

    def look_up(training):
        return lookup(features, training=training, **options)

    rows = by_training(training_of_call() if training is None else training, look_up)
    by_table = dict(zip(hashed, rows, strict=True))
    return [by_table[i] if i in by_table else dense_rows(i) for i in range(len(tables))]


def _as_sequence(rows, ids: Ids):
    """`[num_keys, dim]` to `[batch, T, dim]`."""
    dim = rows.shape[-1]
    if ids.sparse is None:
        padded = ids.ragged.with_values(rows).to_tensor()
        return tf.ensure_shape(padded, [ids.ragged.shape[0], None, dim])
    # Rows go to the positions of their ids, which may have gaps between them.
    shape = tf.concat([ids.sparse.dense_shape, [dim]], 0)
    padded = tf.scatter_nd(ids.sparse.indices, rows, shape)
    return tf.ensure_shape(padded, ids.sparse.shape.with_rank(2).concatenate([dim]))
