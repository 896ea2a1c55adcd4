"""A scope in which every lookup uses TensorFlow's own ops; models are traced in it for export.

    HashFeatures --StockTables--> rows --stock ops--> combined     in place of `hash_lookup.lookup`

Layers whose tables are spread over ranks in other ways find their replacement in `whole`. Results
are those of `training=False` on any number of ranks, with the same bits for float32 rows: the rows
of a sample are added one by one in the order of its keys, as the op adds them.
"""

import contextlib
import dataclasses
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from sok_like.lookup.stock_table import Asked, StockTable, StockTables, joined, seldom, split
from sok_like.runtime.framework.graphs import checked
from sok_like.runtime.framework.scoped_attributes import attributes
from sok_like.table.as_variable import this_thread


class Spread(NamedTuple):
    """A variable of which ranks hold slices; a SavedModel has it whole."""

    shape: Sequence[int]  # of the whole variable
    dtype: tf.DType | None = None  # None on a rank that holds no slice
    begin: Sequence[int] = ()  # the first index of this rank's slice along each axis
    num_rows: int = 0  # of the slice; also 0 if another rank holds the same and writes it
    read: Callable[[int, int], tf.Tensor] | None = None  # the rows from one number up to another


class Exporting:
    """The tables of a model while it is traced; `tables` and `whole` are by `id`."""

    def __init__(
        self, stock: StockTables, tables: Mapping[int, StockTable], whole: Mapping[int, Any]
    ):
        self._stock, self._tables, self._whole = stock, tables, whole
        # That of the variable with a table's rows, by the `id` of the EmbeddingVariable.
        self.handles = {key: stock.rows[table.dim].handle for key, table in tables.items()}
        self._graph: Any = None  # whose lookups are made together, at its end
        self._waiting: list[_Waiting] = []

    def of_holder(self, holder: Any) -> Any:
        """The replacement for the tables of a layer."""
        if id(holder) not in self._whole:
            raise ValueError(
                f"Layer '{holder.name}' is called by the model and is not among its layers, so it "
                "cannot be exported. Hold it as an attribute of the model or of one of its layers."
            )
        return self._whole[id(holder)]

    def rows(self, features: Sequence[Any]) -> list[tf.Tensor]:
        """`hash_lookup.lookup` of HashFeatures."""
        tables = [self._table_of(feature.variable) for feature in features]
        legal = [dataclasses.replace(f, keys=_checked_keys(f.legal())) for f in features]
        if tf.executing_eagerly() or tf.compat.v1.get_default_graph() is not self._graph:
            return self._rows(legal)
        empty = [tf.zeros([0, table.dim]) for table in tables]
        stand_in = tf.compat.v1.placeholder_with_default
        rows = [tf.identity(stand_in(e, [None, e.shape[1]])) for e in empty]
        self._waiting += map(_Waiting, legal, rows)
        return rows

    @contextlib.contextmanager
    def in_progress(self) -> Iterator[list[Any]]:
        """A scope in which lookups use stock ops, made together at its end.

        The caller puts the graph's results into the list; lookups that none of them needs are left
        out.
        """
        results: list[Any] = []
        here = {"_graph": tf.compat.v1.get_default_graph(), "_waiting": []}
        with attributes(this_thread, {"exporting": self}), attributes(self, here):
            yield results
            waiting = self._needed(results) if results else self._waiting
            while waiting:
                # Keys of a lookup may be computed from the rows of another one.
                unmade = {each.rows.op for each in waiting}
                ready = [each for each in waiting if not _ancestors(each.inputs(), {}) & unmade]
                definition = self._graph.as_graph_def()
                functions = (function.node_def for function in definition.library.function)
                ops = [node.op for node in itertools.chain(definition.node, *functions)]
                if any("Assign" in op or "ResourceScatter" in op for op in ops):
                    # The order of writes matters, which the graph does not show.
                    ready = ready[:1]
                for each, rows in zip(ready, self._rows([e.feature for e in ready]), strict=True):
                    each.rows.op._update_input(0, rows)
                waiting = [each for each in waiting if each not in ready]

    def _needed(self, results):
        """The lookups that results need, or ops with effects."""
        tensors = tf.nest.flatten(results, expand_composites=True)
        roots = [tensor.op for tensor in tensors if hasattr(tensor, "op")]
        roots += [op for op in self._graph.get_operations() if op.op_def.is_stateful]
        used = _ancestors(roots, {each.rows.op: each.inputs() for each in self._waiting})
        return [each for each in self._waiting if each.rows.op in used]

    def _rows(self, features):
        with tf.name_scope("stock_lookup"):
            asked = [Asked(self._table_of(f.variable), f.keys) for f in features]
            outputs: list[Any] = [None] * len(features)
            for positions, rows in self._stock(asked):
                of_dim = [features[i] for i in positions]
                for i, output in zip(positions, _combined_each(of_dim, rows), strict=True):
                    outputs[i] = output
            return outputs

    def _table_of(self, variable):
        if id(variable) not in self._tables:
            raise ValueError(
                f"EmbeddingVariable '{variable.table_name}' is looked up by the model and "
                "is not among its variables, so it cannot be exported. Hold it as an attribute of "
                "the model or of one of its layers."
            )
        return self._tables[id(variable)]


@dataclasses.dataclass(eq=False)
class _Waiting:
    """A lookup that is not yet part of the graph."""

    feature: Any
    rows: tf.Tensor  # of an op whose input will be its rows

    def inputs(self):
        """The ops that make its input."""
        tensors = (self.feature.keys, self.feature.row_splits, self.feature.weights)
        return [tensor.op for tensor in tensors if hasattr(tensor, "op")]  # neither None nor eager


def _ancestors(ops, later_inputs):
    """These ops and all that they depend on; `later_inputs`: ops that will feed an op, by it."""
    reached, left = set(), list(ops)
    while left:
        op = left.pop()
        if op not in reached:
            reached.add(op)
            left += [*(tensor.op for tensor in op.inputs), *op.control_inputs]
            left += later_inputs.get(op, [])
    return reached


def current() -> Exporting | None:
    """The export in progress in this thread, or None."""
    return getattr(this_thread, "exporting", None)


def combined(rows: Any, combiner: str, row_splits: Any, weights: Any = None) -> tf.Tensor:
    """Combines rows `[num_keys, dim]` by sample to `[batch, dim]`, with the bits of SokCombine."""
    if weights is not None:
        rows *= weights[:, tf.newaxis]
    if combiner == "none":
        return rows
    batch, ends = tf.size(row_splits, tf.int64) - 1, row_splits[1:]
    size, no_weights = tf.shape(rows, tf.int64)[0], tf.zeros([0], tf.int32)
    sample = tf.cumsum(tf.raw_ops.DenseBincount(input=ends, size=size, weights=no_weights))
    total = tf.math.unsorted_segment_sum(rows, sample, batch)
    if combiner == "sum":
        return total
    if weights is None:
        divisor = tf.cast(ends - row_splits[:-1], tf.float64)
    else:
        squares = weights if combiner == "mean" else tf.cast(weights, tf.float64) ** 2
        divisor = tf.math.unsorted_segment_sum(tf.cast(squares, tf.float64), sample, batch)
    divisor = tf.cast(divisor if combiner == "mean" else tf.sqrt(divisor), tf.float32)
    return tf.math.divide_no_nan(total, divisor[:, tf.newaxis])


def _combined_each(features, rows):
    """`combined` for features whose rows come one after the other."""
    sizes = [tf.size(feature.keys) for feature in features]

    def each():
        return [
            combined(part, feature.combiner, feature.row_splits, feature.weights)
            for part, feature in zip(split(rows, sizes), features, strict=True)
        ]

    sampled = [f.row_splits for f in features if f.combiner != "none"]
    if not sampled or any(f.weights is not None for f in features):
        return each()
    splits = joined(sampled)
    # From the end of a feature to the beginning of the next one, they fall.
    longest = tf.reduce_max(splits[1:] - splits[:-1])
    keys = tf.add_n([n for n, f in zip(sizes, features, strict=True) if f.combiner != "none"])
    has_one_key_each = (longest <= 1) & tf.equal(keys, tf.size(splits) - len(sampled))
    found = tf.cond(has_one_key_each, lambda: split(rows, sizes), seldom(each))
    return tf.nest.flatten(found)  # eagerly a list of one is not a list


def _checked_keys(feature):
    """The keys, after the checks that the lookup op makes of a feature's samples."""
    keys, of = feature.keys, f"(table '{feature.variable.table_name}')"
    number = tf.size(keys, tf.int64)
    if feature.row_splits is not None and feature.combiner != "none":
        lengths = feature.row_splits[1:] - feature.row_splits[:-1]
        number = tf.size(lengths, tf.int64)
        if most := feature.max_hotness:
            rule = f"A sample may hold at most {most} keys. Received:"
            keys = checked(keys, tf.reduce_all(lengths <= most), rule, tf.reduce_max(lengths), of)
    if feature.batch_multiple > 1:
        rule = f"The number of samples must be a multiple of {feature.batch_multiple}. Received:"
        keys = checked(keys, tf.equal(number % feature.batch_multiple, 0), rule, number, of)
    return keys
