"""Checks the arguments of group lookups, and converts every kind of ids to one form.

Arguments are never changed; lists are copied.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any, NamedTuple

import tensorflow as tf
from tensorflow.python.ops.variables import PartitionedVariable

from sok_like.lookup import exporting
from sok_like.lookup.dense_lookup import as_tf_table, check_weights
from sok_like.lookup.sparse_ids import in_order, row_splits, samples_by_table, samples_of
from sok_like.runtime.checks import COMBINERS, require, wrong_argument
from sok_like.runtime.ranks.lookup_options import check_gradient_scale, check_row_dtype
from sok_like.table.keys import dtype_hint
from sok_like.table.variable import EmbeddingVariable, unwrap


class Ids(NamedTuple):
    """Ids of one table.

    Attributes:
        ragged: A `tf.RaggedTensor` `[batch, None]` of integers; None before `by_sample`.
        weights: Floats `[num_keys]`; None for ones.
        sparse: The SparseTensor from which `ragged` was made; None if the input was ragged.
    """

    ragged: Any
    weights: tf.Tensor | None
    sparse: tf.SparseTensor | None


def table_name(table: Any) -> str:
    """A table's name in errors."""
    if isinstance(table, EmbeddingVariable):
        return table.table_name
    return "table" if isinstance(table, tf.Tensor) and tf.executing_eagerly() else table.name


def tables(params: Any) -> list:
    """`params` as a list of EmbeddingVariables and of dense tables for TensorFlow's gather."""
    require(params is not None, "params", "given", params)
    items = params if isinstance(params, (list, tuple)) else [params]
    if not items:
        raise ValueError(f"`params` must hold at least one table. Received: params={params!r}")
    return [_table(param) for param in items]


def _table(param):
    if isinstance(param, PartitionedVariable):
        parts = list(param)
        if len(parts) > 1:
            raise TypeError(
                "`params` must not hold a PartitionedVariable of several parts. "
                f"Received: '{param.name}' in {len(parts)} parts"
            )
        (param,) = parts
    param = unwrap(param)
    if isinstance(param, EmbeddingVariable):
        return param
    table = as_tf_table(param)
    if not isinstance(table, (tf.Variable, tf.Tensor)) or table.shape.rank != 2:
        raise TypeError(
            "`params` must hold sok.EmbeddingVariables or tf.Variables of shape "
            f"[input_dim, output_dim]. Received: {param!r}"
        )
    return table


def one_each(name: str, values: Any, num_tables: int) -> list:
    """A copy of a list or tuple with one item per table; ValueError for anything else."""
    form = {"sp_ids": ", or one RaggedTensor [num_tables, batch, None]"}.get(name, "")
    require(isinstance(values, (list, tuple)), name, f"a list or a tuple{form}", values)
    if len(values) != num_tables:
        raise ValueError(
            f"`{name}` must have an item for each of the {num_tables} tables of `params`. "
            f"Received: {len(values)} items"
        )
    return list(values)


def combiners(given: Sequence[str] | str | None, num_tables: int) -> list[str]:
    """One combiner per table; None means "mean", with a warning."""
    if given is None:
        warnings.warn("`combiners` is None: 'mean' is used.", stacklevel=3)
        given = "mean"
    if isinstance(given, str):
        given = [given] * num_tables
    given = one_each("combiners", given, num_tables)
    for combiner in given:
        if combiner not in COMBINERS:
            raise ValueError(
                f"Each of `combiners` must be one of {COMBINERS}. "
                f"Received: {combiner!r} in {given!r}"
            )
    return given


def check_partition_strategy(partition_strategy: Any) -> None:
    """Raises ValueError unless it is "mod", the only way to spread keys over ranks."""
    if partition_strategy != "mod":
        raise ValueError(
            "`partition_strategy` must be 'mod'. (Pass weights by keyword, `sp_weights=`, because "
            "the order of arguments differs between releases of DeepRec.) "
            f"Received: partition_strategy={partition_strategy!r}"
        )


def check_mode(training: Any, gradient_scale: Any, wire_dtype: Any, name: str) -> None:
    """Raises TypeError unless `training` is a bool or None, and ValueError for other arguments."""
    if not isinstance(training, bool | None):
        raise wrong_argument("training", "a Python bool or None", training, error=TypeError)
    check_gradient_scale(gradient_scale)
    check_row_dtype(wire_dtype, f"lookup '{name}'")


def ids_of(sp_ids: Any, sp_weights: Any, name: str, together: bool = False) -> Ids:
    """Converts ids of one table and their weights to one form.

    With `together`, sparse ids of a hash table may be left for `by_sample` to sort.
    """
    if not isinstance(sp_ids, (tf.SparseTensor, tf.RaggedTensor)):
        raise TypeError(
            "`sp_ids` must be SparseTensors or RaggedTensors; sok.group_embedding_lookup takes "
            f"dense ids. Received: {sp_ids!r} (table '{name}')"
        )
    is_ragged = isinstance(sp_ids, tf.RaggedTensor)
    if sp_ids.shape.rank not in (2, None) or (is_ragged and sp_ids.ragged_rank != 1):
        raise ValueError(
            f"`sp_ids` must be 2-D, [batch, None]. Received: shape {sp_ids.shape} (table '{name}')"
        )
    check_integers("sp_ids", sp_ids, name)
    if sp_weights is not None:
        check_weights(sp_ids, sp_weights, "sp_", f" (table '{name}')")
    if isinstance(sp_ids, tf.RaggedTensor):
        same = sp_weights is None or sp_weights.row_splits is sp_ids.row_splits
        checks = [] if same else [(sp_ids.row_splits, sp_weights.row_splits)]
        return Ids(sp_ids, _aligned(sp_weights, checks, name), None)
    same = sp_weights is None or sp_weights.indices is sp_ids.indices
    if together and same and sp_ids.shape.rank == 2:
        return Ids(None, None if sp_weights is None else sp_weights.values, sp_ids)
    sp_ids = in_order(sp_ids)
    sp_weights = None if sp_weights is None else in_order(sp_weights)
    ragged = tf.RaggedTensor.from_row_splits(sp_ids.values, row_splits(sp_ids), validate=False)
    checks = [] if same else [(sp_ids.indices, sp_weights.indices)]
    return Ids(ragged, _aligned(sp_weights, checks, name), sp_ids)


def is_packed(sp_ids: Any) -> bool:
    """Whether ids are those of all tables in one RaggedTensor, for `packed`."""
    return isinstance(sp_ids, tf.RaggedTensor) and sp_ids.shape.rank == 3


def packed(sp_ids: tf.RaggedTensor, sp_weights: Any, tables: Sequence[Any]) -> list[Ids]:
    """Ids by table, of `[num_tables, batch, None]`."""
    num_tables = len(tables)
    fits = sp_ids.ragged_rank == 2 and sp_ids.shape[0] in (None, num_tables)
    require(
        fits,
        "sp_ids",
        f"of shape [num_tables, batch, None] and of ragged_rank 2 for {num_tables} tables",
        f"shape {sp_ids.shape} of ragged_rank {sp_ids.ragged_rank}",
    )
    if sp_weights is not None:
        same = is_packed(sp_weights) and sp_weights.ragged_rank == 2
        required = "a RaggedTensor of the shape of `sp_ids`"
        require(same, "sp_weights", required, sp_weights)
    names = "', '".join(table_name(table) for table in tables)
    samples, table_splits = sp_ids.values, sp_ids.row_splits
    ids = ids_of(samples, None if sp_weights is None else sp_weights.values, names)
    weights = ids.weights
    if weights is not None and sp_weights.row_splits is not table_splits:
        weights = _at_same_places(weights, [(table_splits, sp_weights.row_splits)], names)
    if exporting.current() is None and all(isinstance(t, EmbeddingVariable) for t in tables):
        by_table = []
        for keys, splits, its_weights in samples_by_table(
            samples, weights, table_splits, num_tables
        ):
            if sp_ids.shape[1] is not None:
                splits.set_shape([sp_ids.shape[1] + 1])
            ragged = tf.RaggedTensor.from_row_splits(keys, splits, validate=False)
            by_table.append(Ids(ragged, its_weights, None))
        return by_table
    rule = f"`sp_ids` must hold the ids of {num_tables} tables"
    check = tf.debugging.assert_equal(sp_ids.nrows(), tf.cast(num_tables, table_splits.dtype), rule)
    with tf.control_dependencies([] if check is None else [check]):
        table_splits = tf.identity(table_splits)

    def of(values):
        inner = samples.with_values(values)
        every = tf.RaggedTensor.from_row_splits(inner, table_splits, validate=False)
        return [every[i] for i in range(num_tables)]

    weights_of = [None] * num_tables if weights is None else [w.values for w in of(weights)]
    return [Ids(i, w, None) for i, w in zip(of(samples.values), weights_of, strict=True)]


def by_sample(ids: Sequence[Ids]) -> list[Ids]:
    """Sorts what `ids_of` left unsorted, by one op for all tables."""
    unsorted = [i for i in ids if i.ragged is None]
    samples = iter(samples_of([i.sparse for i in unsorted], [i.weights for i in unsorted]))
    by_table = []
    for i in ids:
        if i.ragged is None:
            keys, splits, weights = next(samples)
            ragged = tf.RaggedTensor.from_row_splits(keys, splits, validate=False)
            i = Ids(ragged, weights, i.sparse)
        by_table.append(i)
    return by_table


def check_integers(argument: str, ids: Any, name: str) -> None:
    """Raises TypeError unless ids are integers."""
    if not ids.dtype.is_integer:
        raise TypeError(
            f"`{argument}` must be integers. Received: {ids.dtype.name} (table '{name}'). "
            f"{dtype_hint(ids.dtype)}"
        )


def _aligned(weights, checks, name):
    """Flat weights, checked to be at the positions of the ids; None for None."""
    return None if weights is None else _at_same_places(weights.values, checks, name)


def _at_same_places(weights, checks, name):
    """Flat weights, once each pair of tensors of `checks` has been found equal."""
    rule = f"`sp_weights` must have exactly one weight per id (table '{name}')"
    assertions = []
    for left, right in checks:
        left, right = tf.cast(left, tf.int64), tf.cast(right, tf.int64)
        equal = tf.cond(
            tf.reduce_all(tf.equal(tf.shape(left), tf.shape(right))),
            lambda left=left, right=right: tf.reduce_all(tf.equal(left, right)),
            lambda: False,
        )
        assertions.append(tf.debugging.Assert(equal, [rule]))
    with tf.control_dependencies([check for check in assertions if check is not None]):
        return tf.identity(weights)
