"""Group lookups: many tables in one call, and one exchange for all their EmbeddingVariables.

params  [EV a, variable b, EV c, EV a]
            |        |       |     |
            |   gather and   |     |          tf.Variable: each process by itself
            |   combine      |     |
            +--------|-------+-----+--> sok_like.lookup: two collectives forward and
            |        |       |     |    one back, or one fused op if there is one process
outputs [ [B, D] , [B, D], [B, D], [B, D] ]

Ids of every kind are converted to one form. Arguments are never changed; lists are copied.
"""

import sys
import warnings
from collections.abc import Sequence
from typing import Any, NamedTuple

import tensorflow as tf
from tensorflow.python.ops.variables import PartitionedVariable

from sok_like.lookup import dense_lookup, exporting
from sok_like.lookup.exchange import feature_here, lookup_here
from sok_like.lookup.ids import FlatIds, KeySamples, row_splits, samples_by_table, samples_of
from sok_like.lookup.keras_call import by_training, training_of_call
from sok_like.runtime.checks import (
    COMBINERS,
    as_list,
    check_integer,
    require,
    unmet,
    wrong_argument,
)
from sok_like.runtime.framework.graphs import checked
from sok_like.table.keys import as_keys, dtype_hint
from sok_like.table.variable import EmbeddingVariable, unwrap


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
    tables = _tables(params, partition_strategy)
    combiners = combiners_of(combiners, len(tables))
    if sp_weights is not None and is_sequence:
        required = "None if is_sequence is True: nothing is combined"
        raise wrong_argument("sp_weights", required, sp_weights)
    check_integer("params_num_per_group", params_num_per_group)
    name = name or "group_embedding_lookup_sparse"
    with tf.name_scope(name):
        ids = ids_of_tables(sp_ids, sp_weights, tables, combined=not is_sequence)
        samples = [i.samples for i in ids]
        if is_sequence:
            combiners = ["none"] * len(tables)
            samples = [KeySamples(keys, None, None) for keys, *_ in samples]
        names = map(_name, tables)
        features = list(map(feature_here, tables, names, samples, combiners))
        options = {"gradient_scale": gradient_scale, "wire_dtype": wire_dtype, "name": name}
        rows_of_tables = _look_up(features, training, options)
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
    tables = _tables(params, partition_strategy)
    ids = _one_each("ids", ids, len(tables))
    name = name or "group_embedding_lookup"
    with tf.name_scope(name):
        flat, features = [], []
        for i, table in zip(ids, tables, strict=True):
            if isinstance(i, (tf.SparseTensor, tf.RaggedTensor)):
                required = "be dense; sok.group_embedding_lookup_sparse takes others"
                raise unmet("`ids`", required, f"{i!r}", f"table '{_name(table)}'", TypeError)
            i = tf.convert_to_tensor(i)
            check_integers("ids", i, _name(table))
            flat.append(FlatIds(i, None, hashed=True))
            features.append(feature_here(table, _name(table), (flat[-1].ids, None, None)))
        options = {"gradient_scale": gradient_scale, "wire_dtype": wire_dtype, "name": name}
        rows_of_tables = _look_up(features, training, options)
        return [f.restore(rows) for f, rows in zip(flat, rows_of_tables, strict=True)]


def _look_up(features, training, options):
    if not isinstance(training, bool | None):
        raise wrong_argument("training", "a Python bool or None", training, error=TypeError)
    training = training_of_call() if training is None else training
    return by_training(training, lambda training: lookup_here(features, training, **options))


def _as_sequence(rows, ids):
    """`[num_keys, dim]` to `[batch, T, dim]`."""
    source, dim = ids.source, rows.shape[-1]
    if isinstance(source, tf.RaggedTensor):
        return tf.ensure_shape(source.with_values(rows).to_tensor(), [ids.batch, None, dim])
    # Rows go to the positions of their ids, which may have gaps between them.
    padded = tf.scatter_nd(source.indices, rows, tf.concat([source.dense_shape, [dim]], 0))
    return tf.ensure_shape(padded, source.shape.with_rank(2).concatenate([dim]))


def _tables(params, partition_strategy):
    """`params` as a list of EmbeddingVariables and of dense tables for TensorFlow's gather."""
    require(params is not None, "params", "given", params)
    require(bool(as_list(params)), "params", "at least one table", params)
    if partition_strategy != "mod":  # the only way to spread keys over ranks
        required = "'mod'. (Pass weights by keyword, `sp_weights=`, because the order of arguments "
        required += "differs between releases of DeepRec)"
        raise wrong_argument("partition_strategy", required, partition_strategy)
    tables = []
    for param in as_list(params):
        if isinstance(param, PartitionedVariable):
            if len(list(param)) > 1:
                required = "not hold a PartitionedVariable of several parts"
                received = f"'{param.name}' in {len(list(param))} parts"
                raise unmet("`params`", required, received, error=TypeError)
            (param,) = param
        table = unwrap(param)
        if not isinstance(table, EmbeddingVariable):
            table = dense_lookup.as_tf_table(table)
            if not isinstance(table, (tf.Variable, tf.Tensor)) or table.shape.rank != 2:
                required = "hold sok.EmbeddingVariables or tf.Variables of shape "
                required += "[input_dim, output_dim]"
                raise unmet("`params`", required, f"{param!r}", error=TypeError)
        tables.append(table)
    return tables


def _name(table):
    """A table's name in errors."""
    if isinstance(table, EmbeddingVariable):
        return table.table_name
    return "table" if isinstance(table, tf.Tensor) and tf.executing_eagerly() else table.name


def _one_each(name, values, num_tables):
    """A copy of a list or tuple with one item per table; ValueError for anything else."""
    form = {"sp_ids": ", or one RaggedTensor [num_tables, batch, None]"}.get(name, "")
    require(isinstance(values, (list, tuple)), name, f"a list or a tuple{form}", values)
    if len(values) != num_tables:
        required = f"have an item for each of the {num_tables} tables of `params`"
        raise unmet(f"`{name}`", required, f"{len(values)} items")
    return list(values)


def combiners_of(given: Sequence[str] | str | None, num_tables: int) -> list[str]:
    """One combiner per table; None means "mean", with a warning."""
    if given is None:
        warnings.warn("`combiners` is None: 'mean' is used.", stacklevel=3)
        given = "mean"
    by_table = [given] * num_tables if isinstance(given, str) else given
    by_table = _one_each("combiners", by_table, num_tables)
    legal = all(combiner in COMBINERS for combiner in by_table)
    require(legal, "combiners", f"each one of {COMBINERS}", given)
    return by_table


class Ids(NamedTuple):
    samples: KeySamples  # `keys` is None if they are not sorted yet
    source: Any  # a tf.RaggedTensor [batch, None], or a tf.SparseTensor in the order of `samples`

    @property
    def batch(self) -> int | None:
        """The number of samples, if it is known before the lookup."""
        return self.source.shape.with_rank(2)[0]


def ids_of_tables(sp_ids: Any, sp_weights: Any, tables: Sequence[Any], combined: bool) -> list[Ids]:
    """Ids by table, and their weights. Sparse ids of hash tables that are combined: by one op."""
    if isinstance(sp_ids, tf.RaggedTensor) and sp_ids.shape.rank == 3:
        return _packed(sp_ids, sp_weights, tables)
    sp_ids = _one_each("sp_ids", sp_ids, len(tables))
    sp_weights = [None] * len(tables) if sp_weights is None else sp_weights
    ids = []
    for i, weights, table in zip(
        sp_ids, _one_each("sp_weights", sp_weights, len(tables)), tables, strict=True
    ):
        together = combined and isinstance(table, EmbeddingVariable)
        ids.append(_ids_of(i, weights, _name(table), together))
    unsorted = [i for i in ids if i.samples.keys is None]
    weights = [i.samples.weights for i in unsorted]
    samples = iter(samples_of([i.source for i in unsorted], weights))
    return [i if i.samples.keys is not None else i._replace(samples=next(samples)) for i in ids]


def _of_ragged(ids, weights):
    return Ids(KeySamples(as_keys(ids.values), ids.row_splits, weights), ids)


def _ids_of(sp_ids, sp_weights, name, together=False):
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
            values = None if sp_weights is None else sp_weights.values
            return Ids(KeySamples(None, None, values), sp_ids)
    weights = None if sp_weights is None else dense_lookup.flat_weights(sp_ids, sp_weights, *of)
    if is_ragged:
        return _of_ragged(sp_ids, weights)
    sp_ids = tf.sparse.reorder(sp_ids)
    return Ids(KeySamples(as_keys(sp_ids.values), row_splits(sp_ids), weights), sp_ids)


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
    names = "', '".join(_name(table) for table in tables)
    samples, table_splits = sp_ids.values, sp_ids.row_splits
    ids = _ids_of(samples, None if sp_weights is None else sp_weights.values, names)
    weights = ids.samples.weights
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
            ragged = tf.RaggedTensor.from_row_splits(keys, splits, validate=False)
            by_table.append(_of_ragged(ragged, its_weights))
        return by_table
    fits = tf.equal(sp_ids.nrows(), tf.cast(num_tables, table_splits.dtype))
    rule = f"`sp_ids` must hold the ids of {num_tables} tables"
    table_splits = checked(table_splits, fits, rule)

    def cut(ragged):
        of_tables = tf.RaggedTensor.from_row_splits(ragged, table_splits, validate=False)
        return [of_tables[i] for i in range(num_tables)]

    if weights is None:
        return [_of_ragged(of_table, None) for of_table in cut(samples)]
    pairs = zip(cut(samples), cut(samples.with_values(weights)), strict=True)
    return [_of_ragged(of_table, its_weights.values) for of_table, its_weights in pairs]


def check_integers(argument: str, ids: Any, name: str) -> None:
    """Raises TypeError unless the ids of a table are integers."""
    if not ids.dtype.is_integer:
        received = f"{ids.dtype.name} (table '{name}'). {dtype_hint(ids.dtype)}"
        raise unmet(f"`{argument}`", "be integers", received, error=TypeError)
