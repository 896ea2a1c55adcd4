"""Statistics, eviction and scores of tables with policies; `erase`, of every table.

A table with policies counts its training lookups (its steps) and keeps one record per key: the
number of lookups that contained the key, and the step of the last one. A lookup is one call of a
layer or a group lookup with `training=True`, on all ranks together. A key counts once per lookup,
even if it occurs several times, in several features or on several ranks. With
`EmbeddingVariableOption(count="occurrences")` every occurrence counts.
"""

import warnings
from typing import Any, NamedTuple

import tensorflow as tf

from sok_like.runtime.checks import unmet
from sok_like.runtime.native import libraries
from sok_like.runtime.ranks import comm, exchange_order
from sok_like.table.keys import as_keys
from sok_like.table.options import TableOptions
from sok_like.table.policies import CBFFilter
from sok_like.table.snapshots import Snapshots


class PolicyCounts(NamedTuple):
    """Counts since the table was made, cleared or restored: numbers eagerly, tensors in a graph.

    Always `seen == found + admitted + refused`, `size == admitted + written - evicted - erased` and
    `evicted == popped + buffered + dropped`.
    """

    size: Any  # keys with a row
    seen: Any  # keys of training lookups, each once per step
    found: Any  # those that had a row
    admitted: Any  # those that got a row
    refused: Any  # those that must wait
    written: Any  # new keys from sok.assign and restored dumps
    erased: Any
    evicted: Any
    popped: Any  # evicted rows that pop_evicted returned
    buffered: Any  # evicted rows that are still in the buffer
    dropped: Any  # evicted rows that were discarded
    waiting: Any  # keys that wait in a CounterFilter; 0 for a CBFFilter
    forgotten: Any  # keys that a CounterFilter forgot because more than `max_waiting` waited
    dropped_gradients: Any  # gradients of keys without a row
    step: Any


class KeyStatistics(NamedTuple):
    """Statistics of keys; each tensor is `[num_keys]`."""

    present: tf.Tensor  # bool: has a row on this rank
    frequencies: tf.Tensor  # int64: training lookups that contained the key, or its occurrences
    last_steps: tf.Tensor  # int64: step of the last of them; -1 if unknown


class ExportedRows(NamedTuple):
    """Keys of a rank, ascending as unsigned numbers; each tensor begins with `[num_keys]`."""

    keys: tf.Tensor  # int64 [num_keys]
    values: tf.Tensor  # float32 [num_keys, embedding_dim]
    versions: tf.Tensor  # int64 [num_keys]: step of the last training lookup, from 0
    frequencies: tf.Tensor  # int64 [num_keys]


class EvictedRows(NamedTuple):
    """Evicted keys, oldest first, with everything needed to restore them."""

    keys: tf.Tensor  # int64 [num_keys]
    rows: tf.Tensor  # float32 [num_keys, embedding_dim]
    slot_rows: tf.Tensor  # float32 [num_keys, sum of slot widths]
    slot_names: tf.Tensor  # string [num_slots]
    slot_widths: tf.Tensor  # int64 [num_slots]
    frequencies: tf.Tensor  # int64 [num_keys]
    last_steps: tf.Tensor  # int64 [num_keys]


class PolicyMethods(Snapshots):
    """Methods of an EmbeddingVariable; only the first two and `erase` do without records."""

    _options: TableOptions
    _erase_has_warned = False

    def total_count(self, *, all_ranks: bool = False) -> tf.Tensor:
        """`[number of keys on this rank, embedding_dim]`, int64 `[2]`, as in DeepRec.

        Args:
            all_ranks: True counts the keys of the whole table; every rank must call this.
        """
        size = libraries.ops().sok_table_size(handle=self.handle)[tf.newaxis]
        size = self._over_ranks(size, "total_count") if all_ranks else size
        return tf.concat([size, [self._options.embedding_dim]], 0)

    def get_dynamic_shape(self) -> tf.Tensor:
        """As `total_count` of this rank, but also counts keys that wait in a CounterFilter."""
        waiting = self.statistics().waiting if self.keeps_records else 0
        return tf.add(self.total_count(), [waiting, 0])

    def get_frequency(self, keys: Any) -> tf.Tensor:
        """Frequencies of keys of any rank, int64 in the shape of `keys`; every rank must call it.

        Args:
            keys: Integers of any shape, which may differ between ranks. A key never seen has 0.
        """
        return self._of_any_rank(keys, "get_frequency")[0]

    def get_version(self, keys: Any) -> tf.Tensor:
        """Step of a key's last training lookup, int64, counted from 0 like DeepRec's global step.

        Arguments and shape are those of `get_frequency`. -1 for a key never seen, and for waiting
        keys of a CBFFilter, which does not store their steps.
        """
        return tf.maximum(self._of_any_rank(keys, "get_version")[1] - 1, -1)

    def export(self) -> ExportedRows:
        """This rank's keys with rows, versions and frequencies, as in DeepRec.

        `sok.export(variable)` needs no records.
        """
        self._handle_with_records("export")
        content = self.snapshot(with_slots=False)
        frequencies, last_steps = content.records[:, 0], content.records[:, 1]
        return ExportedRows(content.keys, content.rows, tf.maximum(last_steps - 1, 0), frequencies)

    def _of_any_rank(self, keys, method):
        """Frequencies and last steps of keys of any rank."""
        self._handle_with_records(method)
        shape, communicator = tf.shape(tf.convert_to_tensor(keys)), comm.current()
        keys = tf.reshape(as_keys(keys), [-1])
        name = f"sok_{method}_{self._options.name}"
        of_all, lengths = keys, tf.size(keys)[tf.newaxis]
        if communicator.world_size > 1:
            of_all, lengths = exchange_order.exchange_notes(keys, communicator, name)
        statistics = self.key_statistics(of_all)
        # Only the owner knows a key; on other ranks it reads 0 and -1.
        counts = tf.stack([statistics.frequencies, statistics.last_steps + 1])
        if communicator.world_size > 1:
            counts = exchange_order.collective_in_turn(communicator, "sum", counts, f"{name}_found")
        first = tf.reduce_sum(tf.cast(lengths[: communicator.rank], tf.int64))
        counts = counts[:, first : first + tf.size(keys, tf.int64)]
        return tf.reshape(counts[0], shape), tf.reshape(counts[1] - 1, shape)

    def statistics(self, *, all_ranks: bool = False) -> PolicyCounts:
        """Counts of this rank's shard.

        Args:
            all_ranks: True sums over ranks; every rank must call this.
        """
        counts = libraries.ops().sok_table_statistics(
            handle=self._handle_with_records("statistics")
        )
        if all_ranks:
            # The step is the same on all ranks, so it is not summed.
            counts = tf.concat([self._over_ranks(counts[:-1], "statistics"), counts[-1:]], 0)
        if tf.executing_eagerly():
            return PolicyCounts(*counts.numpy().tolist())
        return PolicyCounts(*tf.unstack(counts))

    def key_statistics(self, keys: Any) -> KeyStatistics:
        """Frequency and last step of keys `[num_keys]` in this rank's shard."""
        handle, keys = self._handle_with_records("key_statistics"), tf.reshape(as_keys(keys), [-1])
        return KeyStatistics(*libraries.ops().sok_table_key_statistics(handle=handle, keys=keys))

    def erase(self, keys: Any) -> tf.Tensor:
        """Removes keys `[num_keys]` from this rank's shard, and from its CounterFilter.

        Returns:
            How many had a row on this rank or waited in its filter, int64 scalar.
        """
        is_bloom = isinstance(self._options.policies.filter_option, CBFFilter)
        if is_bloom and not self._erase_has_warned:
            self._erase_has_warned = True
            warnings.warn(
                f"Table '{self._options.name}' has a CBFFilter, which cannot forget a key: "
                "`erase` removes rows, and counters stay. They hold no keys, but tell how often a "
                "key that one asks for has perhaps been seen. A CounterFilter forgets.",
                stacklevel=2,
            )
        keys = tf.reshape(as_keys(keys), [-1])
        return libraries.ops().sok_table_erase(handle=self.handle, keys=keys)

    def evict(self) -> tf.Tensor:
        """Removes the keys that GlobalStepEvict and L2WeightEvict select; dumps do this too.

        Returns:
            Number of keys that this rank removed, int64 scalar.
        """
        return libraries.ops().sok_table_evict(handle=self._handle_with_records("evict"))

    def pop_evicted(self) -> EvictedRows:
        """Returns this rank's evicted rows, up to `evicted_buffer_size`, and empties the buffer."""
        handle = self._handle_with_records("pop_evicted")
        return EvictedRows(*libraries.ops().sok_table_pop_evicted(handle=handle))

    def assign_scores(self, keys: Any, scores: Any) -> tf.Tensor:
        """Sets the scores by which `ScoreEvict("custom")` evicts; larger ones stay longer.

        Args:
            keys: `[num_keys]`, integers. Keys without a row on this rank are ignored, so all ranks
                may pass the same list.
            scores: `[num_keys]`, integers.

        Returns:
            Number of scores that this rank set, int64 scalar.

        Raises:
            ValueError: keys and scores differ in number.
            TypeError: keys or scores are not integers.
            tf.errors.InvalidArgumentError: the table evicts by another score.
        """
        handle = self._handle_with_records("assign_scores")
        keys = tf.reshape(as_keys(keys), [-1])
        scores = tf.reshape(self._as_int64("scores", scores), [-1])
        if not keys.shape.is_compatible_with(scores.shape):
            received = f"{scores.shape[0]} scores for {keys.shape[0]} keys"
            raise unmet("`scores`", "have one item per key", received, self._options.table)
        return libraries.ops().sok_table_assign_scores(handle=handle, keys=keys, scores=scores)

    def set_step(self, step: Any) -> Any:
        """Sets the table's step, the number of its training lookups; the next is `step + 1`.

        A key counts only once per step. To make several lookups of a training step count as one,
        set the step before each of them. Every rank must set the same step.

        Args:
            step: Integer >= 0, a scalar.

        Returns:
            None eagerly; the op in a graph.

        Raises:
            TypeError: `step` is not an integer.
            tf.errors.InvalidArgumentError: `step` is negative or beyond 2**62.
        """
        handle, step = self._handle_with_records("set_step"), self._as_int64("step", step)
        return libraries.ops().sok_table_set_step(handle=handle, step=step)

    def _as_int64(self, argument, value):
        if isinstance(value, (list, tuple)) and not value:
            return tf.zeros([0], tf.int64)
        value = tf.convert_to_tensor(value)
        if not value.dtype.is_integer or value.dtype == tf.uint64:  # its upper half would wrap
            required, dtype = "be of an integer dtype that int64 can hold", value.dtype.name
            raise unmet(f"`{argument}`", required, dtype, self._options.table, TypeError)
        return tf.cast(value, tf.int64)

    def _handle_with_records(self, method):
        """The handle; ValueError unless the table keeps records, which a method needs."""
        if not self.keeps_records:
            raise ValueError(
                f"`{method}` needs a table with policies, or "
                "`EmbeddingVariableOption(record_statistics=True)`. "
                f"Received: table '{self._options.name}' without policies"
            )
        return self.handle

    def _over_ranks(self, counts, what):
        name = f"sok_{what}_{self._options.name}"
        return exchange_order.collective_in_turn(comm.current(), "sum", counts, name)
