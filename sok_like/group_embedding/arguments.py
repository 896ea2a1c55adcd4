"""Checks the arguments of group lookups, and converts every kind of ids to one form.

Arguments are never changed; lists are copied.
"""

import warnings
from collections.abc import Sequence
from typing import Any, NamedTuple

import tensorflow as tf
from tensorflow.python.ops.variables import PartitionedVariable

from sok_like.lookup import dense_lookup, exporting
from sok_like.lookup.ids import row_splits, samples_by_table, samples_of
from sok_like.runtime.checks import COMBINERS, as_list, require, unmet, wrong_argument
from sok_like.runtime.framework.graphs import checked
from sok_like.runtime.ranks.lookup_options import check_gradient_scale, check_row_dtype
from sok_like.table.keys import dtype_hint
from sok_like.table.variable import EmbeddingVariable, unwrap


class Ids(NamedTuple):
    ragged: Any  # tf.RaggedTensor [batch, None] of integers; None if `sparse` is not sorted yet
    weights: tf.Tensor | None  # floats [num_keys]; None for ones
    sparse: tf.SparseTensor | None  # of which `ragged` was made; None if the input was ragged

    @property
    def batch(self) -> int | None:
        """The number of samples, if it is known before the lookup."""
        source = self.ragged if self.sparse is None else self.sparse
        return source.shape.with_rank(2)[0]


def table_name(table: Any) -> str:
    """A table's name in errors."""
    if isinstance(table, EmbeddingVariable):
        return table.table_name
    return "table" if isinstance(table, tf.Tensor) and tf.executing_eagerly() else table.name


def tables(params: Any) -> list:
    """`params` as a list of EmbeddingVariables and of dense tables for TensorFlow's gather."""
    require(params is not None, "params", "given", params)
    items = as_list(params)
    require(bool(items), "params", "at least one table", params)
    return [_table(param) for param in items]


def _table(param):
    if isinstance(param, PartitionedVariable):
        if len(list(param)) > 1:
            required = "not hold a PartitionedVariable of several parts"
            received = f"'{param.name}' in {len(list(param))} parts"
            raise unmet("`params`", required, received, error=TypeError)
        (param,) = param
    param = unwrap(param)
    if isinstance(param, EmbeddingVariable):
        return param
    table = dense_lookup.as_tf_table(param)
    if not isinstance(table, (tf.Variable, tf.Tensor)) or table.shape.rank != 2:
        required = "hold sok.EmbeddingVariables or tf.Variables of shape [input_dim, output_dim]"
        raise unmet("`params`", required, f"{param!r}", error=TypeError)
    return table


def one_each(name: str, values: Any, num_tables: int) -> list:
    """A copy of a list or tuple with one item per table; ValueError for anything else."""
    form = {"sp_ids": ", or one RaggedTensor [num_tables, batch, None]"}.get(name, "")
    require(isinstance(values, (list, tuple)), name, f"a list or a tuple{form}", values)
    if len(values) != num_tables:
        required = f"have an item for each of the {num_tables} tables of `params`"
        raise unmet(f"`{name}`", required, f"{len(values)} items")
    return list(values)


def combiners(given: Sequence[str] | str | None, num_tables: int) -> list[str]:
    """One combiner per table; None means "mean", with a warning."""
    if given is None:
        warnings.warn("`combiners` is None: 'mean' is used.", stacklevel=3)
        given = "mean"
    by_table = [given] * num_tables if isinstance(given, str) else given
    by_table = one_each("combiners", by_table, num_tables)
    legal = all(combiner in COMBINERS for combiner in by_table)
    require(legal, "combiners", f"each one of {COMBINERS}", given)
    return by_table


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


def ids_of_tables(sp_ids: Any, sp_weights: Any, tables: Sequence[Any], combined: bool) -> list[Ids]:
    """Ids by table, and their weights. Sparse ids of hash tables that are combined: by one op."""
    if isinstance(sp_ids, tf.RaggedTensor) and sp_ids.shape.rank == 3:
        return _packed(sp_ids, sp_weights, tables)
    sp_ids = one_each("sp_ids", sp_ids, len(tables))
    sp_weights = [None] * len(tables) if sp_weights is None else sp_weights
    ids = []
    for i, weights, table in zip(
        sp_ids, one_each("sp_weights", sp_weights, len(tables)), tables, strict=True
    ):
        together = combined and isinstance(table, EmbeddingVariable)
        ids.append(ids_of(i, weights, table_name(table), together))
    unsorted = [i for i in ids if i.ragged is None]
    samples = iter(samples_of([i.sparse for i in unsorted], [i.weights for i in unsorted]))
    return [i if i.ragged is not None else _ragged(*next(samples), i.sparse) for i in ids]


def _ragged(keys, row_splits, weights, sparse=None):
    ragged = tf.RaggedTensor.from_row_splits(keys, row_splits, validate=False)
    return Ids(ragged, weights, sparse)


def ids_of(sp_ids: Any, sp_weights: Any, name: str, together: bool = False) -> Ids:
    """Ids of one table and their weights in one form; unsorted if one op sorts all `together`."""
    if not isinstance(sp_ids, (tf.SparseTensor, tf.RaggedTensor)):
        required = "be SparseTensors or RaggedTensors; sok.group_embedding_lookup takes dense ids"
        raise unmet("`sp_ids`", required, f"{sp_ids!r}", f"table '{name}'", TypeError)
    is_ragged = isinstance(sp_ids, tf.RaggedTensor)
    if sp_ids.shape.rank not in (2, None) or (is_ragged and sp_ids.ragged_rank != 1):
        raise unmet("`sp_ids`", "be 2-D, [batch, None]", f"shape {sp_ids.shape}", f"table '{name}'")
    check_integers("sp_ids", sp_ids, name)
    of = "sp_", f" (table '{name}')"
    if sp_weights is not None:
        dense_lookup.check_weights(sp_ids, sp_weights, *of)
    if together and not is_ragged and sp_ids.shape.rank == 2:
        if sp_weights is None or sp_weights.indices is sp_ids.indices:
            return Ids(None, None if sp_weights is None else sp_weights.values, sp_ids)
    weights = None if sp_weights is None else dense_lookup.flat_weights(sp_ids, sp_weights, *of)
    if is_ragged:
        return Ids(sp_ids, weights, None)
    sp_ids = tf.sparse.reorder(sp_ids)
    return _ragged(sp_ids.values, row_splits(sp_ids), weights, sp_ids)


def _packed(sp_ids, sp_weights, tables):
    """Ids by table, of one RaggedTensor `[num_tables, batch, None]`."""
    num_tables = len(tables)
    required = f"of shape [num_tables, batch, None] and of ragged_rank 2 for {num_tables} tables"
    shape = f"shape {sp_ids.shape} of ragged_rank {sp_ids.ragged_rank}"
    fits = sp_ids.ragged_rank == 2 and sp_ids.shape[0] in (None, num_tables)
    require(fits, "sp_ids", required, shape)
    if sp_weights is not None:
        same = isinstance(sp_weights, tf.RaggedTensor) and sp_weights.ragged_rank == 2
        same = same and sp_weights.shape.rank == 3
        require(same, "sp_weights", "a RaggedTensor of the shape of `sp_ids`", sp_weights)
    names = "', '".join(table_name(table) for table in tables)
    samples, table_splits = sp_ids.values, sp_ids.row_splits
    ids = ids_of(samples, None if sp_weights is None else sp_weights.values, names)
    weights = ids.weights
    if weights is not None:
        places = table_splits, sp_weights.row_splits
        weights = dense_lookup.at_same_places(weights, *places, "sp_", f" (table '{names}')")
    if exporting.current() is None and all(isinstance(t, EmbeddingVariable) for t in tables):
        by_table = []
        for keys, splits, its_weights in samples_by_table(
            samples, weights, table_splits, num_tables
        ):
            if sp_ids.shape[1] is not None:
                splits.set_shape([sp_ids.shape[1] + 1])
            by_table.append(_ragged(keys, splits, its_weights))
        return by_table
    fits = tf.equal(sp_ids.nrows(), tf.cast(num_tables, table_splits.dtype))
    rule = f"`sp_ids` must hold the ids of {num_tables} tables"
    table_splits = checked(table_splits, fits, rule)

    def of(values):
        inner = samples.with_values(values)
        every = tf.RaggedTensor.from_row_splits(inner, table_splits, validate=False)
        return [every[i] for i in range(num_tables)]

    weights_of = [None] * num_tables if weights is None else [w.values for w in of(weights)]
    return [Ids(i, w, None) for i, w in zip(of(samples.values), weights_of, strict=True)]


def check_integers(argument: str, ids: Any, name: str) -> None:
    if not ids.dtype.is_integer:
        received = f"{ids.dtype.name} (table '{name}'). {dtype_hint(ids.dtype)}"
        raise unmet(f"`{argument}`", "be integers", received, error=TypeError)
