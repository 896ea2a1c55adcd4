"""Tables as plain variables, looked up by TensorFlow's own ops: the content of a SavedModel.

    keys of all tables [n] --mix--> two buckets --gather--> 2 x 8 keys --equal--> slot --> row

All tables of a model lie one behind the other in the same variables; those of one dim have their
rows in one. So a lookup of many tables has as many ops as one of a single table: for few keys, the
number of ops decides how long it takes.

`sok_like/lookup/buckets.py` says how keys lie in buckets. Rows are in the order of the buckets
without gaps, so only keys have free slots; tables that can be refreshed have a row number per slot
instead (`placement.py`). Every 64-bit key is legal. A table without an index has none here either:
key k is its row k.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf
from tensorflow.python.ops import resource_variable_ops

from sok_like.lookup.buckets import FACTORS, SLOTS, Layout
from sok_like.lookup.stock_rows import MissingRows, by_key, initial_rows

ROW_DTYPES = ("float32", "bfloat16", "int8")
_ABSENT = 8 * SLOTS  # eight times the number of a slot that there is not


class StockTable:
    """Where a table is in the variables of `StockTables`, which sets `first_row` and the like.

    Args:
        variable: The EmbeddingVariable that it stands for.
        num_rows: Number of rows.
        missing: The rows of missing keys.
        layout: The buckets; None without an index. Until the first lookup the salt may change.
    """

    def __init__(
        self, variable: Any, num_rows: int, missing: MissingRows, layout: Layout | None = None
    ):
        self.table_name, self.dim = variable.table_name, variable.dim
        self.key_limit = variable.key_limit
        self.num_rows, self.missing, self.layout = num_rows, missing, layout
        self.number = self.first_row = self.first_bucket = 0

    def about(self) -> str:
        """What `sok.find_key` reads; no lookup does."""
        names = ("table_name", "layout", "first_bucket", "num_rows")
        return json.dumps({name: getattr(self, name) for name in names})


class Asked(NamedTuple):
    """Some keys of a table."""

    table: StockTable
    keys: tf.Tensor  # int64 `[num_keys]`


class StockTables:
    """Keys and rows of whole tables, in host memory.

    The large variables have shapes and no values: the ranks write these into the SavedModel.

    Args:
        tables: The tables.
        row_dtype: One of `ROW_DTYPES`. Each int8 row has a bfloat16 scale.
        refreshable: Whether there are a row number per slot, and `decays`, one per table, which
            change with the steps of training.
    """

    def __init__(self, tables: Sequence[StockTable], row_dtype: str, refreshable: bool = False):
        self.tables, dtype = list(tables), tf.as_dtype(row_dtype)
        num_rows: dict[int, int] = {}  # by dim
        num_buckets = 0
        for number, table in enumerate(tables):
            table.number, table.first_bucket = number, num_buckets
            num_buckets += 0 if table.layout is None else table.layout.num_buckets
            table.first_row = num_rows.get(table.dim, 0)
            num_rows[table.dim] = table.first_row + table.num_rows
        number = self.number_dtype = number_dtype(max(num_rows.values(), default=0))
        self.rows = {d: without_value([n, d], dtype, f"rows_{d}") for d, n in num_rows.items()}
        self.scales = {
            dim: without_value([n], tf.bfloat16, f"scales_{dim}")
            for dim, n in num_rows.items()
            if dtype == tf.int8
        }
        self.keys = self.starts = self.numbers = self.decays = None
        if num_buckets:
            self.keys = without_value([num_buckets, SLOTS], tf.int64, "keys")
        if num_buckets and refreshable:
            self.numbers = without_value([num_buckets * SLOTS], number, "numbers")
            decays = np.array([table.missing.decay for table in tables], np.float32)
            with tf.device("/CPU:0"):
                self.decays = tf.Variable(decays, trainable=False, name="decays")
        elif num_buckets:
            self.starts = without_value([num_buckets], number, "starts")

    def large(self) -> dict[str, tf.Variable]:
        """The variables without values, by name."""
        index = {"keys": self.keys, "starts": self.starts, "numbers": self.numbers}
        by_name = {name: variable for name, variable in index.items() if variable is not None}
        for part, by_dim in (("rows", self.rows), ("scales", self.scales)):
            by_name |= {f"{part}_{dim}": variable for dim, variable in by_dim.items()}
        return by_name

    def small(self) -> list[tf.Variable]:
        """The other variables."""
        each = (self.decays, *(table.missing.default_rows for table in self.tables))
        return [variable for variable in each if variable is not None]

    def __call__(self, asked: Sequence[Asked]) -> list[tuple[list[int], tf.Tensor]]:
        """Looks up keys of many tables together.

        Returns:
            For each dim, or twice if only some tables have an index: the positions in `asked` whose
            rows these are, and the rows float32 `[num_keys, dim]`, one after the other.
        """
        groups = grouped([(a.table.layout is not None, a.table.dim) for a in asked])
        in_groups = [[asked[i] for i in group] for group in groups]
        rows = [self._direct(group) for group in in_groups if group[0].table.layout is None]
        if len(rows) < len(groups):
            rows += self._indexed(in_groups[len(rows) :])
        return list(zip(groups, rows, strict=True))

    def _direct(self, asked):
        """Rows of tables of one dim without an index."""
        rows = [_in_range(table, keys) + table.first_row for table, keys in asked]
        return self._decoded(asked[0].table.dim, joined(rows))

    def _indexed(self, groups):
        """Rows of tables with an index: of those of each dim."""
        asked = [each for group in groups for each in group]
        keys = joined([each.keys for each in asked])
        numbers, is_absent = self._find([each.table for each in asked], keys, _which(asked))

        def by_group(values):
            return split(values, [tf.size(joined([a.keys for a in group])) for group in groups])

        def present():
            of_groups = zip(groups, by_group(numbers), strict=True)
            return [self._decoded(group[0].table.dim, rows) for group, rows in of_groups]

        @seldom
        def filled():
            parts = (by_group(values) for values in (numbers, is_absent, keys))
            return [self._filled(*group) for group in zip(groups, *parts, strict=True)]

        # Only batches with missing keys pay for their rows.
        return tf.nest.flatten(tf.cond(tf.reduce_any(is_absent), filled, present))

    def _find(self, tables, keys, which):
        """The row of each key in the rows of its dim; and whether it is absent."""

        def of_tables(value, dtype):
            return by_key([value(table) for table in tables], which, dtype)

        def factor(number):
            return of_tables(lambda table: table.layout.scales[number], tf.float64)

        salt = of_tables(lambda table: table.layout.salt % 2**64, tf.uint64)
        words = (tf.bitcast(keys, tf.uint64) ^ salt) * _word(FACTORS[0])
        words = (words ^ _scaled(words, 2.0**-32, tf.uint64)) * _word(FACTORS[1])
        first = _scaled(words, factor(0), tf.int64)
        second = first ^ (_scaled(words * _word(FACTORS[2]), factor(1), tf.int64) + 1)
        if len(self.tables) > 1:
            begin = of_tables(lambda table: table.first_bucket, tf.int64)
            first, second = begin + first, begin + second
        eighths = [self._eighths(bucket, keys) for bucket in (first, second)]
        bucket = tf.where(eighths[0] < _ABSENT, first, second)
        slot_eighths = tf.minimum(*eighths)
        is_absent = slot_eighths >= _ABSENT
        if self.numbers is None:
            slot = _scaled(slot_eighths, 1 / 8, self.number_dtype)
            return tf.gather(self.starts, bucket) + slot, is_absent
        slot = tf.minimum(_scaled(slot_eighths, 1 / 8, tf.int64), SLOTS - 1)
        return tf.gather(self.numbers, bucket * SLOTS + slot), is_absent

    def _eighths(self, bucket, keys):
        """Eight times the slot of each key in its bucket, uint8, or `_ABSENT`."""
        is_here = tf.equal(tf.gather(self.keys, bucket), keys[:, tf.newaxis])
        # One word of eight bytes, with 1 in the slot's byte; one less has all bits below it.
        word = tf.bitcast(tf.cast(is_here, tf.uint8), tf.uint64)
        return tf.raw_ops.PopulationCount(x=word - _word(1))

    def _filled(self, asked, numbers, is_absent, keys):
        """Rows of tables of one dim, with those of missing keys."""
        numbers = tf.where(is_absent, tf.zeros_like(numbers), numbers)
        rows, at = self._decoded(asked[0].table.dim, numbers), tf.where(is_absent)
        which = _which(asked)
        which = None if which is None else tf.gather_nd(which, at)
        initial = self._initial([each.table for each in asked], tf.gather_nd(keys, at), which)
        return tf.tensor_scatter_nd_update(rows, at, initial)

    def _initial(self, tables, keys, which):
        """Initial rows of keys of these tables, of one dim."""
        kinds = grouped([table.missing.alike for table in tables])
        if len(kinds) == 1:
            decays = self.decays
            decay = None if decays is None else tf.gather(decays, [t.number for t in tables])
            return initial_rows([table.missing for table in tables], keys, which, decay)
        rows = tf.zeros([tf.size(keys), tables[0].dim])
        for kind in kinds:
            place = np.full(len(tables), -1, np.int32)
            place[kind] = np.arange(len(kind))
            which_of_kind = tf.gather(tf.constant(place), which)
            at = tf.where(which_of_kind >= 0)
            of_kind = self._initial(
                [tables[i] for i in kind], tf.gather_nd(keys, at), tf.gather_nd(which_of_kind, at)
            )
            rows = tf.tensor_scatter_nd_update(rows, at, of_kind)
        return rows

    def _decoded(self, dim, numbers):
        values = tf.cast(tf.gather(self.rows[dim], numbers), tf.float32)
        if not self.scales:
            return values
        return values * tf.cast(tf.gather(self.scales[dim], numbers), tf.float32)[:, tf.newaxis]


def seldom(function: Callable[[], Any]) -> Any:
    """A branch of `tf.cond` that is one op unless it is taken.

    TensorFlow puts the ops of both branches into the graph, and visits those of the other one, too.
    """
    options = {"autograph": False, "experimental_attributes": {"_noinline": True}}
    return tf.function(function, **options)


def grouped(kinds: Sequence[Any]) -> list[list[int]]:
    """Positions of equal kinds, a list for each, in ascending order of kinds and positions."""
    order = sorted(range(len(kinds)), key=kinds.__getitem__)
    return [list(group) for _, group in itertools.groupby(order, kinds.__getitem__)]


def joined(tensors: Sequence[tf.Tensor]) -> tf.Tensor:
    """The tensors, one after the other along the first axis."""
    return tensors[0] if len(tensors) == 1 else tf.concat(tensors, 0)


def split(tensor: tf.Tensor, sizes: Sequence[Any]) -> list[tf.Tensor]:
    """The inverse of `joined`."""
    return [tensor] if len(sizes) == 1 else tf.split(tensor, sizes)


def segments(ends: tf.Tensor, size: tf.Tensor) -> tf.Tensor:
    """The segment of each of `size` places, int32 `[size]`, if segment i ends before `ends[i]`."""
    counts = tf.raw_ops.DenseBincount(input=ends, size=size, weights=tf.zeros([0], tf.int32))
    return tf.cumsum(counts)


def _which(asked):
    """Of each key the position in `asked`; None if there is one."""
    if len(asked) == 1:
        return None
    ends = tf.cumsum(tf.stack([tf.size(each.keys) for each in asked]))
    return segments(ends, ends[-1])


def _in_range(table, keys):
    wrong = (keys < 0) | (keys >= table.key_limit)
    check = tf.debugging.Assert(
        ~tf.reduce_any(wrong),
        [
            f"Keys of table '{table.table_name}' must be in [0, {table.key_limit}). Received:",
            tf.boolean_mask(keys, wrong),
        ],
    )
    with tf.control_dependencies([] if check is None else [check]):
        return tf.identity(keys)


def _scaled(words, scale, dtype):
    """`buckets.scaled`."""
    return tf.cast(tf.cast(words, tf.float64) * scale, dtype)


def _word(number):
    return tf.constant(number, tf.uint64)


def without_value(shape: Any, dtype: tf.DType, name: str) -> tf.Variable:
    """A variable in host memory of which only the shape takes memory."""
    with tf.device("/CPU:0"):
        return resource_variable_ops.UninitializedVariable(
            trainable=False, shape=shape, dtype=dtype, name=name
        )


def number_dtype(num_rows: int) -> Any:
    """The NumPy dtype of numbers of rows."""
    return np.int32 if num_rows < 2**31 else np.int64


def encoded(rows: np.ndarray, dtype: tf.DType, table_name: str) -> list[tf.Tensor]:
    """Rows float32 `[n, dim]` in the dtype of an export; for int8 their scales `[n]`, too.

    Raises:
        ValueError: int8 rows that are not finite.
    """
    if dtype != tf.int8:
        return [tf.cast(rows, dtype)]
    values, scales = _quantized(rows, table_name)
    return [tf.constant(values), tf.cast(scales, tf.bfloat16)]


def _quantized(rows, table_name):
    """int8 rows `[n, dim]` and their bfloat16 scales `[n]`; the largest element becomes 127."""
    if not np.isfinite(rows).all():
        raise ValueError(
            f"`row_dtype` int8 needs finite rows. Received: NaN or infinite ones (table "
            f"'{table_name}')"
        )
    wanted = np.abs(rows).max(axis=1, initial=0.0) / np.float32(127)
    # Rounded up to bfloat16, the upper half of a float32.
    bits = (wanted.astype(np.float32).view(np.uint32) + np.uint32(0xFFFF)) & np.uint32(0xFFFF0000)
    scales = bits.view(np.float32)
    divisor = np.where(scales > 0, scales, np.float32(1))
    return np.rint(rows / divisor[:, np.newaxis]).astype(np.int8), scales
