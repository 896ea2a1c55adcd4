"""`sok.callbacks.TableMetrics`: measures tables during `fit`, for TensorBoard."""

import os
from typing import Any

import tensorflow as tf

from sok_like.inspection.sizes import TableReport, measure_ranks, tables_of
from sok_like.runtime.checks import check_integer
from sok_like.runtime.ranks import comm, training_statistics
from sok_like.runtime.ranks.agreement import agreed

# The metadata that `tf.summary.scalar` writes beside a value. That function belongs to TensorBoard,
# which may not be installed.
_SCALAR = tf.compat.v1.SummaryMetadata(
    plugin_data=tf.compat.v1.SummaryMetadata.PluginData(plugin_name="scalars"), data_class=1
)


class TableMetrics(tf.keras.callbacks.Callback):
    """Writes the size of each hash table of the model, over all ranks together.

    Every rank needs this callback. Rank 0 writes summaries named `<table>/...`.

    Every `every` steps: `keys`, `new_keys` since the last time, `refused_keys` and `evicted_keys`
    (tables with policies), `keys_rank_<r>` and `most_keys_over_mean`. For the ranks' batches of
    that step: `unique_ratio`, different keys over all keys, and `hottest_share`, the share of the
    most frequent 1% of the different keys in all keys. On several ranks `exchange/ms_per_step`:
    time in exchanges since the last time, of the rank with the most.

    At the end of each epoch also `bytes`, `load` and `bytes_rank_<r>`, for which it reads the
    index.

    It takes one collective each time, and one at the start of training.

    Args:
        every: Steps between two measurements.
        log_dir: Folder for TensorBoard; the summaries are in its subfolder `tables`.

    Raises:
        ValueError: `every` is not a positive integer; in training, if the model has no hash table.
        RuntimeError: at the start of training, if rank 0 cannot write to `log_dir`; on all ranks.
            One process gets TensorFlow's error itself.
    """

    def __init__(self, *, every: int = 100, log_dir: str | os.PathLike = "logs"):
        super().__init__()
        self.every = check_integer("every", every)
        self.log_dir = os.fspath(log_dir)
        self._step = self._exchange_step = 0
        self._exchanged = 0.0
        self._inserted: dict[str, int] = {}
        self._tables: list[Any] = []
        self._writer: Any = None

    def on_train_begin(self, logs=None):
        self._tables = []
        training_statistics.observe_batches(False)  # an earlier training may have been interrupted

        def open_on_rank_0():
            if comm.current().rank == 0 and self._writer is None:
                self._writer = tf.summary.create_file_writer(os.path.join(self.log_dir, "tables"))

        agreed(open_on_rank_0, comm.current(), "sok.callbacks.TableMetrics")
        self._exchanged, self._exchange_step = training_statistics.exchange_seconds(), self._step

    def on_train_batch_begin(self, batch, logs=None):
        if (self._step + 1) % self.every == 0:
            training_statistics.observe_batches(True)

    def on_train_batch_end(self, batch, logs=None):
        self._step += 1
        if self._step % self.every == 0:
            self._write(whole=False)

    def on_epoch_end(self, epoch, logs=None):
        self._write(whole=True)

    def on_train_end(self, logs=None):
        training_statistics.observe_batches(False)
        if self._writer is not None:
            self._writer.flush()

    def _write(self, whole):
        # A subclassed model has no tables before its first step.
        self._tables = self._tables or tables_of(self.model)
        if not self._tables:
            raise ValueError(
                "sok.callbacks.TableMetrics needs a model with hash tables. "
                f"Received: model '{self.model.name}', which has none"
            )
        training_statistics.observe_batches(False)
        steps = max(1, self._step - self._exchange_step)
        milliseconds = 1e3 * (training_statistics.exchange_seconds() - self._exchanged) / steps
        tables, exchanges = measure_ranks(self._tables, whole, milliseconds)
        # Exchanges of the measurement itself do not belong to a step.
        self._exchanged, self._exchange_step = training_statistics.exchange_seconds(), self._step
        if self._writer is None:
            return
        values = [(f"{t.name}/{name}", value) for t in tables for name, value in self._of(t, whole)]
        if len(exchanges) > 1 and not whole:  # a validation ends an epoch
            values.append(("exchange/ms_per_step", max(exchanges)))
        with self._writer.as_default(step=self._step):
            for name, value in values:
                tf.summary.write(name, tf.cast(value, tf.float32), metadata=_SCALAR)

    def _of(self, table: TableReport, whole: bool):
        inserted = table.keys + table.evicted
        yield "keys", table.keys
        yield "new_keys", inserted - self._inserted.get(table.name, 0)
        self._inserted[table.name] = inserted
        yield "refused_keys", table.refused
        yield "evicted_keys", table.evicted
        yield "most_keys_over_mean", table.imbalance
        if not whole and table.unique_ratio is not None:
            yield "unique_ratio", table.unique_ratio
            yield "hottest_share", table.hottest_share
        yield from ((f"keys_rank_{r}", n) for r, n in enumerate(table.keys_by_rank))
        if whole:
            yield "bytes", table.bytes
            yield "load", table.load
            yield from ((f"bytes_rank_{r}", n) for r, n in enumerate(table.bytes_by_rank))
