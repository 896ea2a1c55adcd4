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
        looked_up = list(zip(tables, ids, combiners, strict=True))
        features = []
        for table, (ragged, weights, _), combiner in looked_up:
            combined = () if is_sequence else (combiner, ragged.row_splits, weights)
            features.append(_feature(table, ragged.values, *combined))
        fused = _lookup_group(features, training, gradient_scale, wire_dtype, name)
        outputs = []
        for (table, i, combiner), rows in zip(looked_up, fused, strict=True):
            if rows is None:
                rows = _dense_rows(table, i, None if is_sequence else combiner)
            if is_sequence:
                rows = _as_sequence(rows, i)
            else:
                source = i.ragged if i.sparse is None else i.sparse
                rows.set_shape([source.shape.with_rank(2)[0], rows.shape[-1]])
            outputs.append(rows)
        return outputs


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
        features = [_feature(table, f.ids) for table, f in zip(tables, flat, strict=True)]
        fused = _lookup_group(features, training, gradient_scale, wire_dtype, name)
        return [
            lookup_rows(t, i, None, None, table_name(t)) if rows is None else f.restore(rows)
            for t, i, f, rows in zip(tables, ids, flat, fused, strict=True)
        ]


def _feature(table, keys, *combined):
    """None for a tf.Variable."""
    if not isinstance(table, EmbeddingVariable):
        return None
    return HashFeature(table, as_keys(keys), *combined)


def _lookup_group(features, training, gradient_scale, wire_dtype, name):
    """One lookup of all features that are not None; None for the others."""
    of_tables = [feature for feature in features if feature is not None]
    options = {"gradient_scale": gradient_scale, "wire_dtype": wire_dtype, "name": name}

    def look_up(training):
        return lookup(of_tables, training=training, **options)

    rows = iter(by_training(training_of_call() if training is None else training, look_up))
    return [None if feature is None else next(rows) for feature in features]


def _dense_rows(table, ids: Ids, combiner):
    """`[batch, output_dim]`; without a combiner `[num_keys, output_dim]`."""
    name = table_name(table)
    if combiner is None:
        return lookup_rows(table, ids.ragged, None, None, name).values
    weights = None if ids.weights is None else ids.ragged.with_values(ids.weights)
    if combiner != "sqrtn":
        return lookup_rows(table, ids.ragged, combiner, weights, name)
    rows = lookup_rows(table, ids.ragged, "sum", weights, name)
    if weights is None:
        squares = tf.cast(ids.ragged.row_lengths(), rows.dtype)
    else:
        squares = tf.reduce_sum(tf.cast(weights * weights, rows.dtype), axis=1)
    # Without the inner `where`, the gradient of the root at 0 would be NaN for empty samples.
    is_zero = tf.equal(squares, 0)
    root = tf.sqrt(tf.where(is_zero, tf.ones_like(squares), squares))
    return tf.where(is_zero[:, tf.newaxis], tf.zeros_like(rows), rows / root[:, tf.newaxis])


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
