"""A shard at one instant, as tensors: what dumps, checkpoints and copies are made of.

A checkpoint is one rank's part of a table, so it says which: behind the slot names comes the line
`sok_like: rank 0 of 2, step 17`. (TensorFlow would not read earlier checkpoints if this were a
tensor of its own.)
"""

from __future__ import annotations

import re
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from sok_like.runtime import comm, native


class TableSnapshot(NamedTuple):
    """A shard at one instant, as tensors."""

    keys: Any  # int64 [size], ascending as unsigned
    rows: Any  # float32 [size, embedding_dim]
    slot_rows: Any  # float32 [size, sum of slot widths]
    slot_names: Any  # string [num_slots]
    slot_widths: Any  # int64 [num_slots]
    optimizer_step: Any  # int64 scalar, that the slot rows have behind them; -1: not known


class RecordedSnapshot(NamedTuple):
    """The same of a table with policies."""

    keys: Any
    rows: Any
    slot_rows: Any
    slot_names: Any
    slot_widths: Any
    records: Any  # int64 [size, 3]: frequency, last step, custom score
    waiting: Any  # int64 [num_waiting, 3]: key, count, last step
    counters: Any  # int64 [num_counters], of a Bloom filter
    step: Any  # int64 scalar
    optimizer_step: Any


class Snapshots:
    """Methods of an EmbeddingVariable that read and write all of its shard."""

    handle: Any
    keeps_records: bool

    def snapshot(self, with_slots: bool = True, evict: bool = False) -> Any:
        """Keys, rows and slot rows of one instant, with the records of a table that keeps some.

        `evict` first removes what a dump does not hold: see `evict()`.
        """
        fields = native.ops().sok_table_export(
            handle=self.handle, with_slots=with_slots, evict=evict
        )
        kind: Any = RecordedSnapshot if self.keeps_records else TableSnapshot
        return kind(*(getattr(fields, field) for field in kind._fields))

    def load_snapshot(
        self,
        keys,
        rows,
        slot_rows,
        slot_names,
        slot_widths,
        records=None,
        waiting=None,
        counters=None,
        step=-1,
        optimizer_step=-1,
        *,
        replace: bool = True,
    ) -> Any:
        """The inverse of `snapshot`; `replace` removes all other keys first.

        A snapshot of a table without policies has no records: its keys count as never seen.
        NaN in a slot row stands for the optimizer's initial value. A failure changes nothing.
        """
        return native.ops().sok_table_import(
            handle=self.handle,
            replace=replace,
            **_content(
                keys=keys,
                rows=rows,
                slot_rows=slot_rows,
                slot_names=slot_names,
                slot_widths=slot_widths,
                records=records,
                waiting=waiting,
                counters=counters,
                step=step,
                optimizer_step=optimizer_step,
            ),
        )

    def read_aside(self, **content: Any) -> tuple[Any, Any]:
        """The first half of `load_snapshot`, which may fail: the table stays as it is.

        Returns:
            What `take_aside` wants, and a string scalar: why there is none, empty if all is well.
        """
        return native.ops().sok_table_read_aside(handle=self.handle, **_content(**content))

    def take_aside(self, aside: Any) -> Any:
        """The second half, which does not fail; `aside` must not be used again."""
        return native.ops().sok_table_take_aside(handle=self.handle, aside=aside)


def _content(records=None, waiting=None, counters=None, step=-1, optimizer_step=-1, **rows):
    nothing = np.zeros([0, 3], np.int64)
    return {
        **rows,
        "records": nothing if records is None else records,
        "waiting": nothing if waiting is None else waiting,
        "counters": nothing[:, 0] if counters is None else counters,
        "step": step,
        "optimizer_step": optimizer_step,
    }


_PLACE = re.compile(r"sok_like: rank (\d+) of (\d+), step (-?\d+)")


def checkpointed(snapshot: Any) -> dict[str, Any]:
    """The tensors of a checkpoint, which say what rank's part of the table they are."""
    communicator = comm.current()
    tensors = snapshot._asdict()
    place = f"sok_like: rank {communicator.rank} of {communicator.world_size}, step "
    line = tf.strings.join([place, tf.strings.as_string(tensors.pop("optimizer_step"))])
    tensors["slot_names"] = tf.concat([tensors["slot_names"], [line]], axis=0)
    return tensors


def from_checkpoint(tensors: dict[str, Any], table: str) -> dict[str, Any]:
    """The inverse: keyword arguments of `load_snapshot`.

    Raises:
        tf.errors.InvalidArgumentError: the part of another rank, or of another number of ranks.
    """
    communicator = comm.current()
    mine = communicator.rank, communicator.world_size

    def split(names):
        found = _PLACE.fullmatch(names[-1].decode()) if len(names) else None
        if found is None:  # of an earlier version
            return names, np.int64(-1)
        rank, world_size, step = map(int, found.groups())
        if (rank, world_size) != mine:
            raise ValueError(
                f"A checkpoint of table '{table}' must be restored by the rank that wrote it: rank "
                f"{mine[0]} of {mine[1]} needs a path of its own. Received: the part of rank "
                f"{rank} of {world_size}. sok.Saver reads dumps at any number of ranks"
            )
        return names[:-1], np.int64(step)

    names, step = tf.numpy_function(split, [tensors["slot_names"]], [tf.string, tf.int64])
    names.set_shape([None])
    step.set_shape([])
    return {**tensors, "slot_names": names, "optimizer_step": step}
