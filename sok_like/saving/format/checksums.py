"""What proves that a file holds the bytes that were written.

    file       | block of 1 MiB | block | ... | rest |
    CRC-32     | 4 bytes        | 4     | ... | 4    |  ->  SHA-256, which the manifest records

CRC-32 runs at 10 GB/s and zip files have it anyway, so one pass serves the manifest and NumPy. It
finds every change of at most 32 neighbouring bits or of three single bits of a block, and misses
one of 4 billion others. A damaged block changes the SHA-256 of the list.

HDF5 checks nothing: a flipped bit of a file of Keras would load as another row. So arrays of ours
in such a file have one checksum, of their names, dtypes, shapes and bytes:

    vars/keys  vars/rows  ...  vars/sha256
"""

import concurrent.futures
import hashlib
import json
import os
import threading
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from sok_like.runtime.native import libraries
from sok_like.saving.format import durable
from sok_like.saving.format.progress import Progress

OF_ARRAYS = "sha256"  # the name of the checksum beside what it is of
BLOCK = 2**20  # bytes
_CHUNK = 4 * BLOCK  # read at a time: it stays in the cache until it is hashed
_THREADS = 4


class RunningChecksum:
    """The CRC-32 of a file that is written in pieces, in any order and by several threads."""

    def __init__(self):
        self._blocks: dict[int, tuple[int, int]] = {}  # by position: the end, and the CRC-32

    def add(self, at: int, data: memoryview) -> None:
        """Notes the bytes from position `at` on."""
        core, first = libraries.core(), BLOCK - at % BLOCK
        begin, end = at, at + data.nbytes
        for crc in core.crc32_of_blocks(data, first, BLOCK).tolist() if end > begin else ():
            after = min(end, begin // BLOCK * BLOCK + BLOCK)
            self._blocks[begin] = after, crc
            begin = after

    def crc(self, begin: int, end: int) -> int:
        """The CRC-32 of bytes that were noted; a piece began at `begin`."""
        core, crc = libraries.core(), 0
        while begin < end:
            after, more = self._blocks[begin]
            crc, begin = core.crc32_of_two(crc, more, after - begin), after
        return crc

    def checksum(self, size: int) -> str:
        """The checksum of the whole file of `size` bytes."""
        ends = (min(begin + BLOCK, size) for begin in range(0, size, BLOCK))
        return _of_blocks(self.crc(n * BLOCK, end) for n, end in enumerate(ends))


def of_file(path: str, progress: Progress | None = None) -> str:
    """The checksum of a file, read by several threads."""
    size, of_thread = durable.size(path), threading.local()

    def read(begin):
        if not hasattr(of_thread, "buffer"):
            of_thread.buffer = memoryview(bytearray(min(_CHUNK, size)))
        data = of_thread.buffer[: min(_CHUNK, size - begin)]
        durable.read_into(path, begin, data)
        return libraries.core().crc32_of_blocks(data, BLOCK, BLOCK).tolist(), len(data)

    crcs: list[int] = []
    with concurrent.futures.ThreadPoolExecutor(min(_THREADS, os.cpu_count() or 1)) as threads:
        for crcs_of_chunk, num_bytes in threads.map(read, range(0, size, _CHUNK)):
            crcs += crcs_of_chunk
            if progress is not None:
                progress.add(num_bytes)
    return _of_blocks(crcs)


def check_bytes(folder: str, entry: dict[str, Any], rank: int, checksum: str | None = None) -> None:
    """Raises ValueError unless a file is what its rank wrote; reads it if `checksum` is None."""
    path = durable.join(folder, entry["file"])
    if (of_file(path) if checksum is None else checksum) != entry["checksum"]:
        raise durable.wrong(
            path,
            f"have the bytes that rank {rank} has written",
            "bytes with a different checksum; the folder does not yet show them, or has lost them",
        )


def of_fields(fields: Mapping[str, Any]) -> str:
    """The SHA-256 of a list in JSON, without the field that holds it."""
    listed = {field: value for field, value in fields.items() if field != OF_ARRAYS}
    return hashlib.sha256(json.dumps(listed, sort_keys=True).encode()).hexdigest()


def _of_blocks(crcs: Iterable[int]) -> str:
    return hashlib.sha256(np.fromiter(crcs, "<u4").tobytes()).hexdigest()


def write_arrays(store: Any, arrays: Iterable[tuple[str, np.ndarray]], prefix: str = "") -> None:
    """Writes arrays and their checksum into a store of Keras; names get the prefix."""
    digests = {}
    for name, array in arrays:
        store[prefix + name] = array
        digests[name] = _digest(array)
    store[prefix + OF_ARRAYS] = np.frombuffer(_together(digests), np.uint8)


def check_arrays(store: Any, what: str) -> None:
    """Raises ValueError unless arrays of a store of Keras have the checksum beside them."""
    if OF_ARRAYS not in store.keys():
        raise durable.wrong("The file", f"hold the checksum of {what}", "none")
    digests = {name: _digest(store[name]) for name in store.keys() if name != OF_ARRAYS}
    if np.asarray(store[OF_ARRAYS]).tobytes() != _together(digests):
        received = "bytes with a different SHA-256; the file is damaged"
        raise durable.wrong("The file", f"hold {what} as it was written", received)


def _digest(array):
    array = np.asarray(array, order="C")
    digest = hashlib.sha256(f"{array.dtype.str} {array.shape} ".encode())
    if array.size:
        digest.update(array.reshape(-1).view(np.uint8))
    return digest.hexdigest()


def _together(digests):
    lines = (f"{name} {digest}\n" for name, digest in sorted(digests.items()))
    return hashlib.sha256("".join(lines).encode()).digest()
