"""What a table holds at one instant: one type for memory, checkpoints and dump files."""

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np

BY_KEY = ("keys", "rows", "slot_rows", "records")  # one row per key
OF_POLICIES = ("records", "waiting", "counters", "step")
_UNKNOWN, _UNKNOWN_SCALE = np.int64(-1), np.float64(-1)


@dataclasses.dataclass
class TableContent:
    """Keys, rows, slot rows and policies' records of one instant, as tensors or arrays."""

    keys: Any  # int64 [size]
    rows: Any  # float32 [size, embedding_dim]
    slot_rows: Any  # float32 [size, sum of slot widths]; NaN: the optimizer's initial value
    slot_names: Any  # strings [num_slots]
    slot_widths: Any  # int64 [num_slots]
    records: Any = None  # int64 [size, 3]: frequency, last step, custom score; None: no policies
    # int64 [num_waiting, 3]
    waiting: Any = dataclasses.field(default_factory=lambda: np.zeros([0, 3], np.int64))
    # int64, of a Bloom filter
    counters: Any = dataclasses.field(default_factory=lambda: np.zeros([0], np.int64))
    step: Any = _UNKNOWN  # of the policies
    optimizer_step: Any = _UNKNOWN  # steps that slot rows have gone through
    initial_row_scale: Any = _UNKNOWN_SCALE  # left by weight decay of initial rows

    def fields(self) -> dict[str, Any]:
        """By name; without those of policies if the table has none."""
        names = REQUIRED if self.records is None else FIELDS
        return {name: getattr(self, name) for name in names}

    def by_key(self) -> dict[str, Any]:
        """The fields with one row per key, by name."""
        return {name: value for name, value in self.fields().items() if name in BY_KEY}


FIELDS = tuple(field.name for field in dataclasses.fields(TableContent))
REQUIRED = tuple(name for name in FIELDS if name not in OF_POLICIES)  # those of any table


def unread(shape: tuple[int, ...], dtype: Any) -> np.ndarray:
    """An array of this shape without memory, in the place of one that is read in parts."""
    return np.broadcast_to(np.zeros((), dtype), shape)


@dataclasses.dataclass
class TableShard(TableContent):
    """One rank's part of a table, or of what changed in it, whole or to be read in parts."""

    # If `read` is set, the arrays `BY_KEY` only show shapes and dtypes (`unread`). Called with a
    # number of rows, it yields arrays by name with about so many rows.

    erased: np.ndarray | None = None  # int64 [num_erased]; this and the next three: of deltas only
    whole: bool = False
    steps: np.ndarray | None = None  # float64 [num_runs, 3]
    optimizer: str = ""
    read: Callable[[int], Iterator[dict[str, np.ndarray]]] | None = None

    def parts(self, num_rows: int) -> Iterator[dict[str, np.ndarray]]:
        """The rows of these arrays, about so many at a time."""
        if self.read is not None:
            yield from self.read(num_rows)
            return
        arrays = self.by_key()
        for begin in range(0, len(self.keys), num_rows):
            yield {name: array[begin : begin + num_rows] for name, array in arrays.items()}


def nothing(dim: int = 0, with_records: bool = False) -> TableContent:
    """The content of an empty table."""
    keys: Any = np.zeros([0], np.int64)
    rows: Any = np.zeros([0, dim], np.float32)
    records: Any = np.zeros([0, 3], np.int64) if with_records else None
    return TableContent(keys, rows, rows[:, :0], np.zeros([0], object), keys, records)


def slots_by_name(content: TableContent) -> dict[str, np.ndarray]:
    """The slot rows in NumPy by the core's names, each `[size, width]`."""
    names, widths = np.asarray(content.slot_names).tolist(), np.asarray(content.slot_widths)
    rows = np.reshape(content.slot_rows, [len(content.keys), widths.sum()])
    parts = np.split(rows, np.cumsum(widths)[:-1], axis=1) if names else []
    return {name.decode(): part for name, part in zip(names, parts, strict=True)}


def slot_fields(slots: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The inverse of `slots_by_name`, for at least one slot: the fields of a content."""
    return {
        "slot_rows": np.concatenate(list(slots.values()), 1).astype(np.float32),
        "slot_names": np.array([name.encode() for name in slots], object),
        "slot_widths": np.array([part.shape[1] for part in slots.values()], np.int64),
    }
