"""Files of SOK 1.x and 2.x, in which every rank writes its own part."""

from __future__ import annotations

import os
from typing import Any

import numpy as np

from sok_like.saving.format.durable import explained, local


def write_part(
    path: str | os.PathLike, items: np.ndarray, position: int, table: str, begin: bytes = b""
) -> None:
    """Writes this rank's items into a local file, from byte `position` on, and flushes them.

    `begin` is what this rank writes at the start of the file. Errors name the file and the table.
    """
    items = np.ascontiguousarray(items, items.dtype.newbyteorder("<"))
    path = local(path) or path
    try:
        # Unbuffered: after an error, closing the file would write the rest of a buffer again.
        with open(os.open(path, os.O_CREAT | os.O_WRONLY, 0o666), "wb", buffering=0) as file:
            _write(file, 0, begin)
            _write(file, position, items)
            os.fsync(file.fileno())
    except OSError as error:
        named = OSError(error.errno, error.strerror, error.filename or str(path))
        raise explained(named, table) from error


def _write(file, position, data: Any):
    rest = memoryview(data).cast("B") if len(data) else memoryview(b"")
    file.seek(position)
    while rest:
        rest = rest[file.write(rest) :]
