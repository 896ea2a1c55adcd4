"""A scope in which every lookup uses TensorFlow's own ops; models are traced in it for export.

    HashFeature --StockTable--> rows --stock ops--> combined       in place of `hash_lookup.lookup`

Layers whose tables are spread over ranks in other ways find their replacement in `whole`. Results
are those of `training=False` on any number of ranks, with the same bits for float32 rows: the rows
of a sample are added one by one in the order of its keys, as the op adds them.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from sok_like.lookup.stock_table import StockTable
from sok_like.runtime.framework.scoped_attributes import attributes
from sok_like.table.as_variable import stand_ins

_state = threading.local()


class Spread(NamedTuple):
    """A variable of which ranks hold slices; a SavedModel has it whole.

    Attributes:
        shape: Of the whole variable.
        dtype: None on a rank that holds no slice.
        begin: The first index of this rank's slice along each axis.
        num_rows: Of the slice; 0 if there is none, or another rank holds the same and writes it.
        read: Returns the rows of the slice from the first number up to the second one.
    """

    shape: Sequence[int]
    dtype: tf.DType | None = None
    begin: Sequence[int] = ()
    num_rows: int = 0
    read: Callable[[int, int], tf.Tensor] | None = None


class Exporting:
    """The tables of a model while it is traced.

    Args:
        tables: The replacement of each EmbeddingVariable, by its `id`.
        whole: The replacement of what else is spread over ranks, by the `id` of its holder.
    """

    def __init__(self, tables: Mapping[int, StockTable], whole: Mapping[int, Any]):
        self._tables, self._whole = tables, whole

    def handles(self) -> dict[int, Any]:
        """The handle of each table's `rows` variable, by the `id` of the EmbeddingVariable."""
        return {key: table.rows.handle for key, table in self._tables.items()}

    def of_holder(self, holder: Any) -> Any:
        """The replacement for the tables of a layer."""
        if id(holder) not in self._whole:
            raise ValueError(
                f"Layer '{holder.name}' is called by the model and is not among its layers, so it "
                "cannot be exported. Hold it as an attribute of the model or of one of its layers."
            )
        return self._whole[id(holder)]

    def rows(self, feature: Any) -> tf.Tensor:
        """`hash_lookup.lookup` of one HashFeature."""
        table = self._tables.get(id(feature.variable))
        if table is None:
            raise ValueError(
                f"EmbeddingVariable '{feature.variable.table_name}' is looked up by the model and "
                "is not among its variables, so it cannot be exported. Hold it as an attribute of "
                "the model or of one of its layers."
            )
        keys = feature.keys
        with tf.name_scope("stock_lookup"):
            with tf.control_dependencies(_checks(feature)):
                rows = table(tf.identity(keys))
            rows.set_shape([None, table.dim])
            return combined(rows, feature.combiner, feature.row_splits, feature.weights)


def refuse_saved_model(variable: Any, why: str) -> None:
    """Makes TensorFlow's and Keras' own exports of a variable raise NotImplementedError."""
    variable = getattr(variable, "_value", variable)  # inside a variable of Keras 3
    if variable is None:  # Keras has not created it yet
        return

    def refuse(*args, **kwargs):
        raise NotImplementedError(why)

    variable._export_to_saved_model_graph = refuse


def current() -> Exporting | None:
    """The export in progress in this thread, or None."""
    return getattr(_state, "exporting", None)


@contextlib.contextmanager
def exporting(what: Exporting) -> Iterator[None]:
    """A scope in which lookups use stock ops."""
    stand = attributes(stand_ins, {"handles": what.handles()})
    with attributes(_state, {"exporting": what}), stand:
        yield


def combined(rows: Any, combiner: str, row_splits: Any, weights: Any = None) -> tf.Tensor:
    """Combines rows `[num_keys, dim]` by sample to `[batch, dim]`, with the bits of SokCombine."""
    if weights is not None:
        rows *= weights[:, tf.newaxis]
    if combiner == "none":
        return rows
    batch = tf.size(row_splits, tf.int64) - 1
    sample = tf.ragged.row_splits_to_segment_ids(row_splits)
    total = tf.math.unsorted_segment_sum(rows, sample, batch)
    if combiner == "sum":
        return total
    if weights is None:
        divisor = tf.cast(row_splits[1:] - row_splits[:-1], tf.float64)
    else:
        squares = weights if combiner == "mean" else tf.cast(weights, tf.float64) ** 2
        divisor = tf.math.unsorted_segment_sum(tf.cast(squares, tf.float64), sample, batch)
    divisor = tf.cast(divisor if combiner == "mean" else tf.sqrt(divisor), tf.float32)
    return tf.math.divide_no_nan(total, divisor[:, tf.newaxis])


def _checks(feature):
    """The checks that the lookup op makes of a feature's samples."""
    checks = []

    def require(ok, *message):
        check = tf.debugging.Assert(ok, [*message, f"(table '{feature.variable.table_name}')"])
        if check is not None:
            checks.append(check)

    number = tf.size(feature.keys, tf.int64)
    if feature.row_splits is not None and feature.combiner != "none":
        lengths = feature.row_splits[1:] - feature.row_splits[:-1]
        number = tf.size(lengths, tf.int64)
        if feature.max_hotness:
            most = feature.max_hotness
            rule = f"A sample may hold at most {most} keys. Received:"
            require(tf.reduce_all(lengths <= most), rule, tf.reduce_max(lengths))
    if feature.batch_multiple > 1:
        rule = f"The number of samples must be a multiple of {feature.batch_multiple}. Received:"
        require(tf.equal(number % feature.batch_multiple, 0), rule, number)
    return checks
