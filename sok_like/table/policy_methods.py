"""What an EmbeddingVariable with policies can say and do beyond others.

Such a table counts its training lookups, which are its steps, and keeps a record a key: how many
lookups contained it, and the last one's step. A lookup is one call of a layer or group lookup with
`training=True`, on all ranks together; a key that occurs several times in it, in several features
or on several ranks, counts once.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import tensorflow as tf

from sok_like.runtime import comm, native
from sok_like.table.keys import as_keys


class PolicyCounts(NamedTuple):
    """Counts since the table was made, cleared or restored; numbers eagerly, tensors in a graph.

    Nothing is lost without being counted: `seen == found + admitted + refused`,
    `size == admitted + written - evicted - erased`, `evicted == popped + buffered + dropped`.
    """

    size: Any  # keys with a row
    seen: Any  # keys of training lookups, each once a step
    found: Any  # of these: had a row
    admitted: Any  # got one
    refused: Any  # were kept waiting by a filter
    written: Any  # new keys of sok.assign and of a restored dump
    erased: Any
    evicted: Any
    popped: Any  # evicted rows handed back by pop_evicted
    buffered: Any  # evicted rows it would hand back now
    dropped: Any  # evicted rows that were not kept
    waiting: Any  # keys a CounterFilter keeps waiting; 0 for a CBFFilter
    dropped_gradients: Any  # keys of updates that had no row
    step: Any


class KeyStatistics(NamedTuple):
    """Of keys `[num_keys]`."""

    present: tf.Tensor  # bool: has a row on this rank
    frequencies: tf.Tensor  # int64: training lookups that contained the key
    last_steps: tf.Tensor  # int64: step of the last one; -1 where there was none or it is not known


class EvictedRows(NamedTuple):
    """Evicted keys, oldest first, with all that is needed to bring them back."""

    keys: tf.Tensor  # int64 [n]
    rows: tf.Tensor  # float32 [n, embedding_dim]
    slot_rows: tf.Tensor  # float32 [n, sum of slot widths]
    slot_names: tf.Tensor  # string [num_slots]
    slot_widths: tf.Tensor  # int64 [num_slots]
    frequencies: tf.Tensor  # int64 [n]
    last_steps: tf.Tensor  # int64 [n]


class PolicyMethods:
    """Methods of an EmbeddingVariable; those of its policies need an `ev_option` that has some."""

    handle: Any
    _options: dict
    keeps_records: bool

    def total_count(self, *, all_ranks: bool = False) -> tf.Tensor:
        """Keys this rank holds, int64 scalar.

        Args:
            all_ranks: Those of the whole table instead; every rank must call.
        """
        size = native.ops().sok_table_size(handle=self.handle)
        return self._over_ranks(size[tf.newaxis], "total_count")[0] if all_ranks else size

    def statistics(self, *, all_ranks: bool = False) -> PolicyCounts:
        """Counts of this rank's shard.

        Args:
            all_ranks: Sums over ranks instead; every rank must call.

        Raises:
            ValueError: the table keeps no records.
        """
        self._need_records("statistics")
        counts = native.ops().sok_table_statistics(handle=self.handle)
        if all_ranks:
            # The step is the same everywhere: no sum.
            counts = tf.concat([self._over_ranks(counts[:-1], "statistics"), counts[-1:]], 0)
        if tf.executing_eagerly():
            return PolicyCounts(*counts.numpy().tolist())
        return PolicyCounts(*tf.unstack(counts))

    def key_statistics(self, keys: Any) -> KeyStatistics:
        """Frequency and last step of keys `[num_keys]` in this rank's shard.

        Raises:
            ValueError: the table keeps no records.
        """
        self._need_records("key_statistics")
        keys = tf.reshape(as_keys(keys), [-1])
        return KeyStatistics(*native.ops().sok_table_key_statistics(handle=self.handle, keys=keys))

    def evict(self) -> tf.Tensor:
        """Removes what GlobalStepEvict and L2WeightEvict remove; a dump does so by itself.

        Returns:
            How many keys this rank removed, int64 scalar.

        Raises:
            ValueError: the table keeps no records.
        """
        self._need_records("evict")
        return native.ops().sok_table_evict(handle=self.handle)

    def pop_evicted(self) -> EvictedRows:
        """Evicted rows of this rank, up to `evicted_buffer_size`, which are then forgotten.

        Raises:
            ValueError: the table keeps no records.
        """
        self._need_records("pop_evicted")
        return EvictedRows(*native.ops().sok_table_pop_evicted(handle=self.handle))

    def assign_scores(self, keys: Any, scores: Any) -> tf.Tensor:
        """Sets the scores by which `ScoreEvict("custom")` evicts; larger ones stay longer.

        Args:
            keys: `[num_keys]`, integers. Those without a row on this rank are passed over, so all
                ranks may give the same list.
            scores: `[num_keys]`, integers.

        Returns:
            How many scores this rank took, int64 scalar.

        Raises:
            ValueError: the table keeps no records, or keys and scores differ in number.
            TypeError: keys or scores are no integers.
            tf.errors.InvalidArgumentError: the table evicts by another score.
        """
        self._need_records("assign_scores")
        scores = tf.convert_to_tensor(scores)
        if not scores.dtype.is_integer:
            raise TypeError(f"`scores` must be integers. Received: {scores.dtype.name}")
        keys = tf.reshape(as_keys(keys), [-1])
        scores = tf.reshape(tf.cast(scores, tf.int64), [-1])
        if not keys.shape.is_compatible_with(scores.shape):
            raise ValueError(
                f"`scores` must be one a key. Received: {scores.shape[0]} scores for "
                f"{keys.shape[0]} keys (table '{self._options['name']}')"
            )
        return native.ops().sok_table_assign_scores(handle=self.handle, keys=keys, scores=scores)

    def set_step(self, step: Any) -> Any:
        """Sets the table's step, which else counts its training lookups; the next is `step + 1`.

        A key that was counted in a step is not counted again in the same step. To have several
        lookups of a training step count as one, set the step before each of them. Every rank must
        set the same.

        Args:
            step: Integer >= 0, a scalar.

        Returns:
            Nothing when eager; the op in a graph.

        Raises:
            ValueError: the table keeps no records.
            tf.errors.InvalidArgumentError: `step` is negative or beyond 2**62.
        """
        self._need_records("set_step")
        step = tf.cast(step, tf.int64)
        return native.ops().sok_table_set_step(handle=self.handle, step=step)

    def _need_records(self, method):
        if not self.keeps_records:
            raise ValueError(
                f"`{method}` needs a table with policies, or "
                "`EmbeddingVariableOption(record_statistics=True)`. "
                f"Received: table '{self._options['name']}' without"
            )

    def _over_ranks(self, counts, what):
        communicator = comm.current()
        gathered = communicator.all_gather(counts, f"sok_{what}_{self._options['name']}")
        return tf.reduce_sum(tf.reshape(gathered, [communicator.world_size, -1]), axis=0)
