"""The files of SOK 2.x's `dump`.

    <table>-key                      keys
    <table>-weight                   rows, in the order of the keys
    <table>-<optimizer>-<slot>       one slot variable of these rows
    <table>-<optimizer>-iterations   the optimizer's number of steps; SOK 2.x has no such file

Each begins with a head of 296 bytes; texts are padded with spaces on the left, integers big-endian:

    256  table | 4  kind: 0 key, 1 rows, 2 slot | 32  slot | 4  dtype, see `_DTYPES`

The numbers after it are little-endian. In names "_" replaces punctuation.
"""

from __future__ import annotations

import pathlib
import string
from typing import Any

import numpy as np

KEY, WEIGHT, SLOT = 0, 1, 2
ITERATIONS = "iterations"
HEAD = 296

_NAME, _SLOT_NAME = 256, 32
_DTYPES = (
    *(np.int32, np.int64, np.uint32, np.uint64),
    *(np.float16, np.float32, np.float64),
)


def stem(name: str) -> str:
    """The name of a variable as it appears in file names."""
    return name.translate({ord(letter): "_" for letter in string.punctuation})


def file_name(table: str, kind: int, optimizer: str = "", slot: str = "") -> str:
    """The name of a file; `table` is a `stem`."""
    return f"{table}{('-key', '-weight', f'-{optimizer}-{slot}')[kind]}"


def head(table: str, kind: int, slot: str, dtype: Any) -> bytes:
    """The head of a file.

    Raises:
        ValueError: a text is too long, or files cannot have the dtype.
    """
    numbers = [i for i, known in enumerate(_DTYPES) if np.dtype(known) == np.dtype(dtype)]
    if not numbers:
        raise ValueError(f"Files of sok2.dump cannot hold {np.dtype(dtype)} (table '{table}')")
    texts = [(table.encode(), _NAME), (slot.encode(), _SLOT_NAME)]
    for text, most in texts:
        if len(text) > most:
            raise ValueError(
                f"A name must have {most} bytes at most. Received: {text.decode()!r} "
                f"(table '{table}')"
            )
    name, slot_name = (text.rjust(most) for text, most in texts)
    return name + kind.to_bytes(4, "big") + slot_name + numbers[0].to_bytes(4, "big")


def read(path: pathlib.Path, kind: int, dim: int | None = None) -> np.ndarray:
    """The items of a file: `[num_items]`, or `[num_items, dim]` memory-mapped.

    Raises:
        FileNotFoundError: the file is missing.
        ValueError: the file is of another kind, or truncated.
    """
    size = path.stat().st_size
    with open(path, "rb") as file:
        begin = file.read(HEAD)
    found = int.from_bytes(begin[_NAME : _NAME + 4], "big")
    number = int.from_bytes(begin[-4:], "big")
    if len(begin) < HEAD or found != kind or number >= len(_DTYPES):
        raise ValueError(f"{path} must begin with the head of a file of sok2.dump of kind {kind}")
    dtype = np.dtype(_DTYPES[number]).newbyteorder("<")
    width = dtype.itemsize * (dim or 1)
    if (size - HEAD) % width:
        raise ValueError(
            f"{path} must hold whole rows of {width} bytes. Received: {size - HEAD} bytes"
        )
    count = (size - HEAD) // width
    shape = (count,) if dim is None else (count, dim)
    if not count:
        return np.zeros(shape, dtype)
    return np.memmap(path, dtype, "r", HEAD, shape)
