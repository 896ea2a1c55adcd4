"""What a table holds at one instant: one type for memory, checkpoints and dump files."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

BY_KEY = ("keys", "rows", "slot_rows", "records")  # one row per key
OF_POLICIES = ("records", "waiting", "counters", "step")


def _no_waiting():
    return np.zeros([0, 3], np.int64)


def _no_counters():
    return np.zeros([0], np.int64)


@dataclasses.dataclass
class Content:
    """Keys, rows and slot rows of one instant, with the records of policies.

    Fields are tensors, arrays, or in a `Shard` arrays without memory.
    """

    keys: Any  # int64 [size]
    rows: Any  # float32 [size, embedding_dim]
    slot_rows: Any  # float32 [size, sum of slot widths]; NaN: the optimizer's initial value
    slot_names: Any  # strings [num_slots]
    slot_widths: Any  # int64 [num_slots]
    records: Any = None  # int64 [size, 3]: frequency, last step, custom score; None: no policies
    waiting: Any = dataclasses.field(default_factory=_no_waiting)  # int64 [num_waiting, 3]
    counters: Any = dataclasses.field(default_factory=_no_counters)  # int64, of a Bloom filter
    step: Any = -1  # of the policies; -1: unknown, as in the next two
    optimizer_step: Any = -1  # steps that slot rows have gone through
    initial_row_scale: Any = -1.0  # left by weight decay of initial rows

    def fields(self) -> dict[str, Any]:
        """By name; without those of policies if the table has none."""
        without = OF_POLICIES if self.records is None else ()
        return {name: getattr(self, name) for name in FIELDS if name not in without}


FIELDS = tuple(field.name for field in dataclasses.fields(Content))
# Those that every file has: version 0.1 wrote no step and no scale at first.
REQUIRED = FIELDS[: FIELDS.index("records")]


def nothing(dim: int = 0, with_records: bool = False) -> Content:
    """The content of an empty table."""
    keys: Any = np.zeros([0], np.int64)
    rows: Any = np.zeros([0, dim], np.float32)
    content = Content(keys, rows, rows[:, :0], np.zeros([0], object), keys)
    if with_records:
        content.records, content.step = _no_waiting(), np.int64(-1)
    return content
