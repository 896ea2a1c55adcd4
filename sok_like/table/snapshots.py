"""A shard at one instant, as tensors: what dumps, checkpoints and copies are made of."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from sok_like.runtime import native


class TableSnapshot(NamedTuple):
    """A shard at one instant, as tensors."""

    keys: Any  # int64 [size], ascending as unsigned
    rows: Any  # float32 [size, embedding_dim]
    slot_rows: Any  # float32 [size, sum of slot widths]
    slot_names: Any  # string [num_slots]
    slot_widths: Any  # int64 [num_slots]


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
        if self.keeps_records:
            return RecordedSnapshot(*fields)
        return TableSnapshot(*fields[: len(TableSnapshot._fields)])

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
        *,
        replace: bool = True,
    ) -> Any:
        """The inverse of `snapshot`; `replace` removes all other keys first.

        A snapshot without records is one of a table without policies: its keys were seen never.
        """
        nothing = np.zeros([0, 3], np.int64)
        return native.ops().sok_table_import(
            handle=self.handle,
            keys=keys,
            rows=rows,
            slot_rows=slot_rows,
            slot_names=slot_names,
            slot_widths=slot_widths,
            records=nothing if records is None else records,
            waiting=nothing if waiting is None else waiting,
            counters=nothing[:, 0] if counters is None else counters,
            step=step,
            replace=replace,
        )
