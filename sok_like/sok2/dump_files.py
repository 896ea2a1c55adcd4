"""The files of SOK 2.x's `dump`.

    <table>-key                      keys
    <table>-weight                   rows, in the order of the keys
    <table>-<optimizer>-<slot>       one slot variable of these rows
    <table>-<optimizer>-iterations   the optimizer's number of steps; SOK 2.x has no such file

Each begins with a head of 296 bytes; texts are padded with spaces on the left, integers big-endian:

    256  table | 4  kind: 0 key, 1 rows, 2 slot | 32  slot | 4  dtype, see `_DTYPES`

The numbers after it are little-endian. In names "_" replaces punctuation.
"""

from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np

from sok_like.runtime.checks import unmet
from sok_like.saving.format import durable

KEY, WEIGHT, SLOT = 0, 1, 2
ITERATIONS = "iterations"
HEAD = 296

_NAME, _SLOT_NAME = 256, 32
_INTEGERS = (np.int32, np.int64, np.uint32, np.uint64)
_DTYPES = (*_INTEGERS, np.float16, np.float32, np.float64)


def slot_files(folder: str, tables: Iterable[str]) -> Iterator[str]:
    """The names of the files in a folder that hold slots of these tables, of any optimizer."""
    begins = {table: table.encode().rjust(_NAME) + SLOT.to_bytes(4, "big") for table in tables}
    for name in durable.names(folder):
        table, *rest = name.split("-")
        if table in begins and len(rest) == 2 and "." not in rest[1]:
            path = durable.join(folder, name)
            if durable.size(path) >= HEAD and durable.read(path, 0, _NAME + 4) == begins[table]:
                yield name


def head(table: str, kind: int, slot: str, dtype: Any) -> bytes:
    """The head of a file."""
    if np.dtype(dtype).type not in _DTYPES:
        raise ValueError(f"Files of sok2.dump cannot hold {np.dtype(dtype)} (table '{table}')")
    texts = [(table, _NAME), (slot, _SLOT_NAME)]
    for text, most in texts:
        if len(text.encode()) > most:
            raise unmet("A name", f"have {most} bytes at most", f"{text!r}", f"table '{table}'")
    name, slot_name = (text.encode().rjust(most) for text, most in texts)
    number = _DTYPES.index(np.dtype(dtype).type)
    return name + kind.to_bytes(4, "big") + slot_name + number.to_bytes(4, "big")


def read_integers(path: str, kind: int) -> np.ndarray:
    """The numbers in a file as int64, uint64 by their bits."""
    dtype, _, size = _opened(path, kind, _INTEGERS)
    return np.frombuffer(durable.read(path, HEAD, size), dtype).astype(np.int64)


def read_rows(path: str, kind: int, shape: tuple[int, int], positions: np.ndarray) -> np.ndarray:
    """The rows at positions, which ascend, of `[num_rows, dim]` in a file; some MiB at a time."""
    num_rows, dim = shape
    dtype, num_found, _ = _opened(path, kind, _DTYPES, dim)
    if num_found != num_rows:
        required = f"hold {num_rows} rows of {dim} numbers, one for each key"
        raise unmet(path, required, f"{num_found} rows of that width")
    rows, row_bytes = np.empty([len(positions), dim], dtype), dim * dtype.itemsize
    step = max(1, 2**22 // row_bytes)
    for begin in range(0, num_rows, step):
        part = np.empty([min(step, num_rows - begin), dim], dtype)
        ends = begin, begin + len(part)
        first, last = (int(np.searchsorted(positions, end)) for end in ends)
        if first < last:
            durable.read_into(path, HEAD + begin * row_bytes, part)
            rows[first:last] = part[positions[first:last] - begin]
    return rows


def _opened(path, kind, legal, dim=1):
    """A file's dtype, its number of rows of `dim` numbers, and how many bytes they have."""
    size = durable.size(path)
    begin = durable.read(path, 0, min(size, HEAD))
    kind_of_file = int.from_bytes(begin[_NAME : _NAME + 4], "big")
    number = int.from_bytes(begin[-4:], "big")
    if len(begin) < HEAD or kind_of_file != kind or number >= len(legal):
        raise ValueError(f"{path} must begin with the head of a file of sok2.dump of kind {kind}")
    dtype, size = np.dtype(legal[number]).newbyteorder("<"), size - HEAD
    width = dtype.itemsize * dim
    if size % width:
        raise unmet(path, f"hold whole rows of {width} bytes", f"{size} bytes")
    return dtype, size // width, size
