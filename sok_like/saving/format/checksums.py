"""What proves that a file holds the bytes that were written.

    file       | block of 1 MiB | block | ... | rest |
    CRC-32     | 4 bytes        | 4     | ... | 4    |  ->  SHA-256, which the manifest records

CRC-32 runs at 10 GB/s and zip files have it anyway, so one pass serves the manifest and NumPy. It
finds every change of at most 32 neighbouring bits or of three single bits of a block, and misses
one of 4 billion others. A damaged block changes the SHA-256 of the list.
"""

from __future__ import annotations

import concurrent.futures
import hashlib
import os
import threading
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from sok_like.runtime.native import libraries
from sok_like.saving.format import durable
from sok_like.saving.format.progress import Progress

BLOCK = 2**20  # bytes
_CHUNK = 4 * BLOCK  # read at a time: it stays in the cache until it is hashed
_THREADS = 4


class RunningChecksum:
    """The CRC-32 of a file that is written in pieces, in any order and by several threads."""

    def __init__(self):
        self._found: dict[int, tuple[int, int]] = {}  # by position: the end, and the CRC-32

    def add(self, at: int, data: memoryview) -> None:
        """Notes the bytes from position `at` on."""
        core, first = libraries.core(), BLOCK - at % BLOCK
        begin, end = at, at + data.nbytes
        for crc in core.crc32_of_blocks(data, first, BLOCK).tolist() if end > begin else ():
            after = min(end, begin // BLOCK * BLOCK + BLOCK)
            self._found[begin] = after, crc
            begin = after

    def crc(self, begin: int, end: int) -> int:
        """The CRC-32 of bytes that were noted; a piece began at `begin`."""
        core, crc = libraries.core(), 0
        while begin < end:
            after, more = self._found[begin]
            crc, begin = core.crc32_of_two(crc, more, after - begin), after
        return crc

    def checksum(self, size: int) -> str:
        """The checksum of the whole file of `size` bytes."""
        ends = (min(begin + BLOCK, size) for begin in range(0, size, BLOCK))
        return _of_blocks(self.crc(n * BLOCK, end) for n, end in enumerate(ends))


def of_file(path: str, progress: Progress | None = None) -> str:
    """The checksum of a file, read by several threads."""
    size, mine = durable.size(path), threading.local()

    def read(begin):
        if not hasattr(mine, "buffer"):
            mine.buffer = memoryview(bytearray(min(_CHUNK, size)))
        data = mine.buffer[: min(_CHUNK, size - begin)]
        durable.read_into(path, begin, data)
        return libraries.core().crc32_of_blocks(data, BLOCK, BLOCK).tolist(), len(data)

    crcs: list[int] = []
    with concurrent.futures.ThreadPoolExecutor(min(_THREADS, os.cpu_count() or 1)) as threads:
        for found, num_bytes in threads.map(read, range(0, size, _CHUNK)):
            crcs += found
            if progress is not None:
                progress.add(num_bytes)
    return _of_blocks(crcs)


def of_entry(path: str, entry: Mapping[str, Any], progress: Progress | None = None) -> dict:
    """A manifest's entry for a file, with the checksum of the bytes that are there now."""
    if "sha256" in entry:
        return {**entry, "sha256": _sha256_of_file(path, progress)}
    return {**entry, "checksum": of_file(path, progress)}


def check_bytes(folder: str, entry: dict[str, Any], rank: int) -> None:
    """Raises ValueError unless a file, read from the folder, is what its rank wrote."""
    found = of_entry(durable.join(folder, entry["file"]), entry)
    check_same(folder, found, entry, rank)


def check_same(folder: str, found: dict[str, Any], entry: dict[str, Any], rank: int) -> None:
    """The same for bytes that were read before; `found` is the entry with their checksum."""
    if found != entry:
        raise ValueError(
            f"{durable.join(folder, entry['file'])} must have the bytes that rank {rank} has "
            "written. Received: bytes with a different checksum; the folder does not yet show "
            "them, or has lost them"
        )


def _sha256_of_file(path: str, progress: Progress | None) -> str:
    """The checksum of a file that version 0.1 wrote."""
    digest = hashlib.sha256()
    size = durable.size(path)
    for begin in range(0, size, _CHUNK):
        data = durable.read(path, begin, min(_CHUNK, size - begin))
        digest.update(data)
        if progress is not None:
            progress.add(len(data))
    return digest.hexdigest()


def _of_blocks(crcs: Iterable[int]) -> str:
    return hashlib.sha256(np.fromiter(crcs, "<u4").tobytes()).hexdigest()
