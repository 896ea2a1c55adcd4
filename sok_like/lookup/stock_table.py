"""Tables as plain variables, looked up by TensorFlow's own ops: the content of a SavedModel.

    keys of all tables [n] --mix--> first bucket --gather--> 8 keys --equal--> slot --> row
                                      the few that are not there: second bucket, the same

All tables of a model lie one behind the other in the same variables; those of one dim have their
rows in one. So a lookup of many tables has as many ops as one of a single table: for few keys, the
number of ops decides how long it takes.

`sok_like/lookup/buckets.py` says how keys lie in buckets. Rows are in the order of the buckets
without gaps, so only keys have free slots; tables that can be refreshed have a row number per slot
instead. Every 64-bit key is legal. A table without an index has none here either:
key k is its row k.
"""

import json
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf
from tensorflow.python.ops import resource_variable_ops

from sok_like.lookup.buckets import FACTORS, SLOTS, Layout
from sok_like.lookup.stock_rows import MissingRows, by_key, initial_rows
from sok_like.runtime.checks import positions_of
from sok_like.runtime.framework.graphs import checked

ROW_DTYPES = ("float32", "bfloat16", "int8")
# One bit in each of the eight bytes but the last.
_BYTES = sum(1 << 8 * byte for byte in range(SLOTS - 1))


class StockTable:
    """Where a table is in the variables of `StockTables`, which sets `first_row` and the like."""

    # Without a `layout` it has no index. Until the first lookup the layout's salt may change.

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
    """Keys and rows of whole tables, in host memory; ranks write large ones into the SavedModel."""

    # Each int8 row has a bfloat16 scale. If `refreshable`, there are a row number per slot, and
    # `decays`, one per table, which change with the steps of training.

    def __init__(self, tables: Sequence[StockTable], row_dtype: str, refreshable: bool = False):
        self.tables, dtype = list(tables), tf.as_dtype(row_dtype)
        num_rows: dict[int, int] = {}  # by dim
        num_buckets = 0
        for number, table in enumerate(tables):
            table.number, table.first_row = number, num_rows.get(table.dim, 0)
            num_rows[table.dim] = table.first_row + table.num_rows
        # The first bucket of a table is a multiple of its width, which is a power of two.
        indexed = [(table, table.layout) for table in tables if table.layout is not None]
        for table, layout in sorted(indexed, key=lambda pair: -pair[1].width):
            table.first_bucket = num_buckets
            num_buckets += layout.num_buckets
        number = self.number_dtype = number_dtype(max(num_rows.values(), default=0))
        # By name; ranks write them in parts, see `without_value`.
        self.large: dict[str, tf.Variable] = {}

        def large(name, shape, dtype):
            self.large[name] = without_value(shape, dtype, name)
            return self.large[name]

        self.keys = self.starts = self.numbers = self.decays = None
        if num_buckets:
            self.keys = large("keys", [num_buckets, SLOTS], tf.int64)
        if num_buckets and refreshable:
            self.numbers = large("numbers", [num_buckets * SLOTS], number)
            decays = np.array([table.missing.decay for table in tables], np.float32)
            with tf.device("/CPU:0"):
                self.decays = tf.Variable(decays, trainable=False, name="decays")
        elif num_buckets:
            self.starts = large("starts", [num_buckets], number)
        self.rows = {d: large(f"rows_{d}", [n, d], dtype) for d, n in num_rows.items()}
        sizes = num_rows if dtype == tf.int8 else {}
        self.scales = {d: large(f"scales_{d}", [n], tf.bfloat16) for d, n in sizes.items()}

    def small(self) -> list[tf.Variable]:
        """The other variables."""
        each = (self.decays, *(table.missing.default_rows for table in self.tables))
        return [variable for variable in each if variable is not None]

    def __call__(self, asked: Sequence[Asked]) -> list[tuple[list[int], tf.Tensor]]:
        """For each dim, with and without an index: positions in `asked`, and the rows of these."""
        kinds = positions_of((a.table.layout is not None, a.table.dim) for a in asked)
        groups = [group for _, group in sorted(kinds.items())]
        in_groups = [[asked[i] for i in group] for group in groups]
        rows = [self._direct(group) for group in in_groups if group[0].table.layout is None]
        if len(rows) < len(groups):
            rows += self._indexed(in_groups[len(rows) :])
        return list(zip(groups, rows, strict=True))

    def _direct(self, asked):
        """Rows of tables of one dim without an index."""
        rows = []
        for table, keys in asked:
            limit = table.key_limit
            wrong = (keys < 0) | (keys >= limit)
            rule = f"Keys of table '{table.table_name}' must be in [0, {limit}). Received:"
            legal = checked(keys, ~tf.reduce_any(wrong), rule, tf.boolean_mask(keys, wrong))
            rows.append(legal + table.first_row)
        return self._decoded(asked[0].table.dim, joined(rows))

    def _indexed(self, groups):
        """Rows of tables with an index: of those of each dim."""
        asked = [each for group in groups for each in group]
        keys = joined([each.keys for each in asked])
        # Of all features: a branch takes this one tensor, not the keys of each.
        sizes = tf.stack([tf.size(each.keys) for each in asked])
        numbers, elsewhere, is_absent = self._find([each.table for each in asked], keys, sizes)
        sizes_of_groups = tf.split(sizes, [len(group) for group in groups])

        def by_group(values):
            return split(values, [tf.reduce_sum(sizes) for sizes in sizes_of_groups])

        def present():
            of_groups = zip(groups, by_group(numbers), strict=True)
            return [self._decoded(group[0].table.dim, rows) for group, rows in of_groups]

        @seldom
        def filled():
            is_missing = tf.scatter_nd(elsewhere, is_absent, [tf.size(keys)])
            parts = (by_group(values) for values in (numbers, is_missing, keys))
            tables = [[each.table for each in group] for group in groups]
            of_groups = zip(tables, sizes_of_groups, *parts, strict=True)
            return [self._filled(*group) for group in of_groups]

        # Only batches with missing keys pay for their rows.
        return tf.nest.flatten(tf.cond(tf.reduce_any(is_absent), filled, present))

    def _find(self, tables, keys, sizes):
        """The row of each key in the rows of its dim, any number for absent ones."""
        # Returns also where in `keys` those are that are not in their first bucket, `[n, 1]`, and
        # whether these are absent, `[n]`.
        words, first = _first_buckets(tables, keys, sizes)
        slot, is_elsewhere = self._slots(first, keys)
        numbers = self._numbers_at(first, slot)

        def others():
            at = tf.where(is_elsewhere)
            place = at[:, 0]
            scales = [table.layout.scales[1] for table in tables]
            scale = by_key(scales, _which(sizes, place), tf.float64)
            way = _scaled(tf.gather(words, place) * _word(FACTORS[2]), scale, tf.int64) + 1
            second = tf.bitwise.bitwise_xor(tf.gather(first, place), way)
            slot, is_absent = self._slots(second, tf.gather(keys, place))
            found = self._numbers_at(second, slot)
            return tf.tensor_scatter_nd_update(numbers, at, found), at, is_absent

        def none():
            return numbers, tf.zeros([0, 1], tf.int64), tf.zeros([0], tf.bool)

        return tf.cond(tf.reduce_any(is_elsewhere), others, none)

    def _slots(self, bucket, keys):
        """The slot of each key in its bucket, uint8, and whether it has none: then this is 7."""
        is_here = tf.equal(tf.gather(self.keys, bucket), keys[:, tf.newaxis])
        # One word of eight bytes, with 1 in the slot's byte; one less has all bits below it.
        word = tf.bitcast(tf.cast(is_here, tf.uint8), tf.uint64)
        slot = tf.raw_ops.PopulationCount(x=(word - _word(1)) & _word(_BYTES))
        return slot, tf.equal(word, _word(0))

    def _numbers_at(self, bucket, slot):
        """The rows that belong to slots."""
        if self.numbers is None:
            return tf.gather(self.starts, bucket) + tf.cast(slot, self.number_dtype)
        return tf.gather(self.numbers, bucket * SLOTS + tf.cast(slot, tf.int64))

    def _filled(self, tables, sizes, numbers, is_absent, keys):
        """Rows of tables of one dim, with those of missing keys."""
        numbers = tf.where(is_absent, tf.zeros_like(numbers), numbers)
        rows, at = self._decoded(tables[0].dim, numbers), tf.where(is_absent)
        initial = self._initial(tables, tf.gather_nd(keys, at), _which(sizes, at[:, 0]))
        return tf.tensor_scatter_nd_update(rows, at, initial)

    def _initial(self, tables, keys, which):
        """Initial rows of keys of these tables, of one dim."""
        kinds = list(positions_of(table.missing.alike for table in tables).values())
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
    """A branch of `tf.cond` as one op: TensorFlow visits the ops of a branch not taken, too."""
    options = {"autograph": False, "experimental_attributes": {"_noinline": True}}
    return tf.function(function, **options)


def joined(tensors: Sequence[tf.Tensor]) -> tf.Tensor:
    """The tensors, one after the other along the first axis."""
    return tensors[0] if len(tensors) == 1 else tf.concat(tensors, 0)


def split(tensor: tf.Tensor, sizes: Sequence[Any]) -> list[tf.Tensor]:
    """The inverse of `joined`."""
    return [tensor] if len(sizes) == 1 else tf.split(tensor, sizes)


def _first_buckets(tables, keys, sizes):
    """Random words, uint64 `[num_keys]`, and the first bucket of each key, as `buckets.choices`."""
    # In most batches all features have as many keys: then no key needs the number of its table.
    salts = [table.layout.salt % 2**64 for table in tables]
    scales = [table.layout.scales[0] for table in tables]
    begins = [table.first_bucket for table in tables]

    def hashed(keys, which):
        words = (tf.bitcast(keys, tf.uint64) ^ by_key(salts, which, tf.uint64)) * _word(FACTORS[0])
        words = (words ^ _scaled(words, 2.0**-32, tf.uint64)) * _word(FACTORS[1])
        first = _scaled(words, by_key(scales, which, tf.float64), tf.int64)
        return words, first + by_key(begins, which, tf.int64) if any(begins) else first

    def alike():
        which = tf.range(len(tables))[:, tf.newaxis]
        words, first = hashed(tf.reshape(keys, [len(tables), -1]), which)
        return tf.reshape(words, [-1]), tf.reshape(first, [-1])

    def unlike():
        return hashed(keys, _which(sizes, tf.range(tf.size(keys))))

    if len(tables) == 1:
        return unlike()
    return tf.cond(tf.reduce_all(tf.equal(sizes, sizes[0])), alike, seldom(unlike))


def _which(sizes, at):
    """The feature that has the keys at some places; None if there is only one."""
    if sizes.shape[0] == 1:
        return None
    return tf.searchsorted(tf.cumsum(sizes), tf.cast(at, tf.int32), side="right")


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
    """Rows in the dtype of an export, and int8's scales; ValueError for int8 of non-finite rows."""
    if dtype != tf.int8:
        return [tf.cast(rows, dtype)]
    if not np.isfinite(rows).all():
        raise ValueError(
            f"`row_dtype` int8 needs finite rows. Received: NaN or infinite ones (table "
            f"'{table_name}')"
        )
    wanted = np.abs(rows).max(axis=1, initial=0.0) / np.float32(127)  # the largest becomes 127
    # Rounded up to bfloat16, the upper half of a float32.
    bits = (wanted.astype(np.float32).view(np.uint32) + np.uint32(0xFFFF)) & np.uint32(0xFFFF0000)
    scales = bits.view(np.float32)
    divisor = np.where(scales > 0, scales, np.float32(1))
    values = np.rint(rows / divisor[:, np.newaxis]).astype(np.int8)
    return [tf.constant(values), tf.cast(scales, tf.bfloat16)]
