"""`lookup_sparse`, `all2all_dense_embedding` and `sparse_read_and_evict` of SOK 2.x.

                     one rank                    several ranks
    spread tables    lookup of hash tables       the same: two collectives, and one back
    dense tables     TensorFlow's gather         exchange of dense tables: the same number
    localized        lookup of hash tables       together with dense tables

All tables of a kind travel together.
"""

import dataclasses
from typing import Any

import tensorflow as tf

from sok_like.group_embedding.lookup_sparse import check_integers, combiners_of, ids_of_tables
from sok_like.lookup import exporting
from sok_like.lookup.exchange import (
    BY_KEY,
    Exchange,
    exchange_lookup,
    feature_here,
    lookup_here,
    most_ids,
)
from sok_like.lookup.ids import FlatIds
from sok_like.lookup.keras_call import by_training, check_listed, training_of_call
from sok_like.lookup.local_variables import unique_in_graph
from sok_like.runtime.checks import as_list, require, unmet, wrong_argument
from sok_like.runtime.framework.graphs import checked
from sok_like.runtime.native import libraries
from sok_like.runtime.ranks import comm
from sok_like.sok2.distributed_variable import is_static, own_variable
from sok_like.table.policy_methods import PolicyCounts
from sok_like.table.variable import unwrap


def lookup_sparse(
    params: Any,
    sp_ids: Any,
    sp_weights: Any = None,
    combiners: Any = None,
    use_low_frequency_filter: bool = False,
) -> Any:
    """Rows of one or several tables, combined by sample; every rank must call it.

    Missing keys of a DynamicVariable are inserted, except in a Keras call with `training=False`,
    where their initial rows are read.

    Args:
        params: A variable of this package or a list of them, of any kind. The gradients of a
            variable that occurs twice are added.
        sp_ids: A `tf.SparseTensor` `[batch, max_hotness]` or `tf.RaggedTensor` `[batch, None]` of
            integers, or a list with one for each of `params`.
        sp_weights: None, or floats of the kind and shape of `sp_ids`. A mean is divided by the sum
            of the weights.
        combiners: "mean", "sum" or "sqrtn", or a list with one for each of `params`; None: "mean".
        use_low_frequency_filter: Only for tables of var_type "hybrid"; their `filter_ratio`, 1.0,
            admits every key, as without the filter.

    Returns:
        `[batch, dim]` in the variable's dtype, or a list of these if `sp_ids` is a list or a tuple.
        An empty sample, or one whose weights add up to 0, gives zeros. The gradient of a row is the
        sum over all ranks.

    Raises:
        TypeError: a variable, ids or weights are of another kind.
        ValueError: lists differ in length, or a combiner is unknown.
        tf.errors.InvalidArgumentError: an id is outside its table; on every rank.
    """
    is_list, sp_ids = isinstance(sp_ids, (list, tuple)), as_list(sp_ids)
    tables = [_table(param) for param in as_list(params)]
    combiners = combiners_of("mean" if combiners is None else combiners, len(tables))
    for table in tables if use_low_frequency_filter else ():
        is_hybrid = getattr(table, "backend_type", None) == "hybrid"
        required = "False except for DynamicVariables of var_type 'hybrid'"
        of = f"table '{table.table_name}'"
        require(is_hybrid, "use_low_frequency_filter", required, use_low_frequency_filter, of)
    for table, i in zip(tables, sp_ids, strict=False):
        check_listed(table, getattr(i, "values", i))
    name = unique_in_graph("sok2_lookup_sparse")
    with tf.name_scope(name):
        of_tables = None if sp_weights is None else as_list(sp_weights)
        ids = ids_of_tables(sp_ids, of_tables, tables, combined=True)
        outputs = _look_up(list(map(_feature, tables, [i.samples for i in ids], combiners)), name)
        for rows, i in zip(outputs, ids, strict=True):
            rows.set_shape([i.batch, rows.shape[-1]])
    return outputs if is_list else outputs[0]


def all2all_dense_embedding(param: Any, indices: Any) -> tf.Tensor:
    """One row per index; every rank must call it.

    Args:
        param: A variable of this package.
        indices: Integers of any shape.

    Returns:
        The shape of the indices plus a last axis `dim`, in the variable's dtype. The gradient of a
        row is the sum over all ranks.

    Raises:
        TypeError: the variable is of another kind, or indices are not dense integers.
        tf.errors.InvalidArgumentError: an index is outside its table; on every rank.
    """
    table = _table(param)
    indices = tf.convert_to_tensor(indices)
    check_integers("indices", indices, table.table_name)
    check_listed(table, indices)
    name = unique_in_graph("sok2_all2all_dense_embedding")
    flat = FlatIds(indices, None, hashed=True)
    return flat.restore(_look_up([_feature(table, (flat.ids, None, None))], name)[0])


def _table(param):
    table = own_variable(param, "`params` must hold sok2.Variables or sok2.DynamicVariables")
    if is_static(table) and table.dtype not in (tf.float32, tf.float16, tf.bfloat16):
        required, of = "be of dtype float32, float16 or bfloat16", f"table '{table.table_name}'"
        raise unmet("A variable that is looked up", required, table.dtype.name, of, TypeError)
    return table


def _feature(table, samples, combiner="none"):
    feature = feature_here(table, table.table_name, samples, combiner)
    limit = feature.key_limit
    if is_static(table):
        limit = table.global_shape[0]
    elif table.home is not None:
        limit = most_ids(comm.current().world_size)
    owner = BY_KEY if table.home is None else table.home
    return dataclasses.replace(feature, key_limit=limit, owner=owner)


def _look_up(features, name):
    """Rows of features, with the `training` flag of a Keras call."""
    alone = comm.current().world_size == 1 or exporting.current() is not None
    shards, others = [], []  # over ranks: dense tables, and hash tables on one rank; all others
    for feature in features:
        is_shard = is_static(feature.variable) or feature.variable.home is not None
        (shards if is_shard and not alone else others).append(feature)

    def look_up(training):
        of_others, of_shards = lookup_here(others, training, name), []
        # After the other tables: if those fail, they fail on all ranks.
        with tf.control_dependencies(of_others):
            if shards:
                how = Exchange(f"{name}_shards", training, gradient_scale=1.0)
                of_shards = exchange_lookup(shards, how)
        pairs = zip([*others, *shards], [*of_others, *of_shards], strict=True)
        by_feature = {id(f): tf.cast(rows, f.variable.dtype) for f, rows in pairs}
        return [by_feature[id(feature)] for feature in features]

    return by_training(training_of_call(), look_up)


_DROPPED = PolicyCounts._fields.index("dropped")


def sparse_read_and_evict(
    var: Any, indices: Any, name: str | None = None
) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
    """Rows of keys, and the rows evicted from a full table for them; every rank must call it.

    Args:
        var: DynamicVariable of var_type "hybrid".
        indices: Keys, integers of any shape. Missing keys are inserted.
        name: Name scope of the ops.

    Returns:
        Rows, float32, the shape of the keys plus a last axis `dimension`, with a gradient. Evicted
        keys `[num_evicted]` int64 and rows `[num_evicted, dimension]` of this rank, since the last
        call, by this or other lookups, oldest first.

    Raises:
        TypeError: `var` is not such a table.
        tf.errors.InvalidArgumentError: this call evicted more rows than a rank keeps (65,536 or
            `max_capacity` if that is less); the oldest are lost.
    """
    table = unwrap(var)
    if getattr(table, "backend_type", None) != "hybrid":
        raise wrong_argument("var", "a DynamicVariable of var_type 'hybrid'", var, error=TypeError)
    with tf.name_scope(name or "sparse_read_and_evict"):
        before = _dropped(table)
        with tf.control_dependencies([before]):
            rows = all2all_dense_embedding(table, indices)
        with tf.control_dependencies([rows]):
            popped, after = table.pop_evicted(), _dropped(table)
        rule = f"Rows evicted from table {table.table_name} were lost: pass fewer keys at a time"
        with tf.control_dependencies([checked(after, tf.equal(before, after), rule)]):
            return tf.identity(rows), tf.identity(popped.keys), tf.identity(popped.rows)


def _dropped(table):
    return libraries.ops().sok_table_statistics(handle=table.handle)[_DROPPED]
