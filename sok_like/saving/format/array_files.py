"""Files of arrays, one of each rank: uncompressed `.npz`, which NumPy reads.

    local header | .npy header, elements | local header | ... | directory | its end

All sizes are known before anything is written, so elements are written in any order and by several
threads, while others are read. The local headers and the directory hold CRC-32, so they are written
last. Every size is written as in zip files beyond 4 GiB, whatever it is.

A dump's manifest lists its files (`manifest.py`). Dense tables and variables of ranks have a list
with size and checksum of each file, `dense.3f2a/files.json` beside `dense.3f2a/0-of-2.npz`.
"""

import collections
import concurrent.futures
import contextlib
import io
import json
import math
import os
import struct
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from sok_like.saving.format import checksums, durable
from sok_like.saving.format.progress import Progress

_LIST, _FIELDS = "files.json", {"file", "bytes", "checksum"}
_WRITERS = 2  # threads
_WAITING = 4  # arrays that wait for them at most
_VERSION, _UTF_8 = 45, 0x800  # of zip: sizes of 64 bits; names beyond ASCII
_DATE = 1 << 5 | 1  # 1980-01-01
_LARGE = 0xFFFFFFFF  # the size is in the extra field
_LOCAL, _ENTRY = struct.Struct("<4s5H3L2HHH2Q"), struct.Struct("<4s2B5H3L5H2LHH3Q")
_END = struct.Struct("<4sQ2H2L4Q4sLQL4s4H2LH")


Shapes = Mapping[str, tuple[tuple[int, ...], Any]]  # shape and dtype of each array, by name


class Layout:
    """The places of arrays in a file: where the elements of each begin, and its `.npy` header."""

    def __init__(self, arrays: Shapes):
        self.begins: dict[str, int] = {}
        self.npy_headers: list[tuple[int, bytes]] = []  # with their positions
        self._members: list[tuple[bytes, int, int, int]] = []  # name, header, data, end
        at = 0
        for name, (shape, dtype) in arrays.items():
            if np.dtype(dtype).hasobject:
                raise ValueError(f"A file of arrays cannot hold array '{name}' of {dtype}")
            file_name, header = f"{name}.npy".encode(), io.BytesIO()
            descr = np.lib.format.dtype_to_descr(np.dtype(dtype))
            fields = {"descr": descr, "fortran_order": False, "shape": tuple(shape)}
            np.lib.format.write_array_header_1_0(header, fields)
            data = at + _LOCAL.size + len(file_name)
            self.npy_headers.append((data, header.getvalue()))
            self.begins[name] = data + len(header.getvalue())
            end = self.begins[name] + math.prod(shape) * np.dtype(dtype).itemsize
            self._members.append((file_name, at, data, end))
            at = end
        self._directory = at
        entries = sum(_ENTRY.size + len(name) for name, *_ in self._members)
        self.size = at + entries + _END.size

    def zip_headers(self, crc: Callable[[int, int], int]) -> Iterator[tuple[int, bytes]]:
        """Position and bytes of what makes it a zip file; `crc` is of bytes between positions."""
        directory = b""
        for name, at, data, end in self._members:
            size, checksum = end - data, crc(data, end)
            flags = 0 if name.isascii() else _UTF_8
            common = _VERSION, flags, 0, 0, _DATE, checksum, _LARGE, _LARGE, len(name)
            fixed = _LOCAL.pack(b"PK\3\4", *common, 20, 1, 16, size, size)
            yield at, fixed[:30] + name + fixed[30:]
            entry = _ENTRY.pack(
                *(b"PK\1\2", _VERSION, 3, *common, 28, 0, 0, 0, 0o600 << 16, _LARGE),
                *(1, 24, size, size, at),
            )
            directory += entry[:46] + name + entry[46:]
        count, end = len(self._members), self._directory + len(directory)
        yield (
            self._directory,
            directory
            + _END.pack(
                *(b"PK\6\6", 44, _VERSION, _VERSION, 0, 0, count, count, len(directory)),
                *(self._directory, b"PK\6\7", 0, end, 1),
                *(b"PK\5\6", 0, 0, count, count, _LARGE, _LARGE, 0),
            ),
        )


class ArrayFile:
    """A file whose arrays are written; at its end `entry` is its name, bytes and checksum."""

    def __init__(self, file: Any, layout: Layout, progress: Progress):
        self._file, self._layout, self._progress = file, layout, progress
        self._checksum = checksums.RunningChecksum()
        self._threads = concurrent.futures.ThreadPoolExecutor(_WRITERS)
        self._waiting: collections.deque = collections.deque()
        self.entry: dict[str, Any] = {}

    def put(self, name: str, elements: np.ndarray, at: int = 0) -> None:
        """Writes elements that nobody changes any more into an array, from byte `at` of it on."""
        if elements.nbytes:
            elements = np.ascontiguousarray(elements).reshape(-1).view(np.uint8)
            self._put(self._layout.begins[name] + at, elements.data)

    def _put(self, at, data):
        self._waiting.append(self._threads.submit(self._write, at, data))
        self._wait(_WAITING)  # raises earlier errors
        self._progress.add(len(data))

    def _wait(self, left=0):
        while len(self._waiting) > left:
            self._waiting.popleft().result()

    def _write(self, at, data):
        self._checksum.add(at, data)
        begin, size = at, len(data)
        while data:
            written = os.pwrite(self._file.fileno(), data, at)
            at, data = at + written, data[written:]
        durable.begin_flush(self._file, begin, size)


@contextlib.contextmanager
def written(
    folder: str, name: str, arrays: Shapes, progress: str | None = None
) -> Iterator[ArrayFile]:
    """A file whose arrays are written within the block; then it gets its name. Shows progress."""
    durable.make_folder(folder)
    layout = Layout(arrays)
    shown = contextlib.closing(Progress(progress, layout.size))
    with durable.written(durable.join(folder, name)) as file, shown as of_file:
        array_file = ArrayFile(file, layout, of_file)
        with array_file._threads:
            yield array_file
            checksum = array_file._checksum
            for headers in (layout.npy_headers, layout.zip_headers(checksum.crc)):
                for at, header in headers:
                    array_file._put(at, memoryview(header))
                array_file._wait()
            entry = {"file": name, "bytes": layout.size, "checksum": checksum.checksum(layout.size)}
            array_file.entry = entry


class Unread(NamedTuple):
    """An array that is read when it is written."""

    shape: tuple[int, ...]
    dtype: Any
    read: Callable[[], Any]


def write(folder: str, rank: int, world_size: int, arrays: Mapping[str, Unread]) -> dict[str, Any]:
    """Writes one rank's file; returns its entry in the list."""
    shapes = {name: array[:2] for name, array in arrays.items()}
    with written(folder, f"{rank}-of-{world_size}.npz", shapes) as file:
        for name, array in arrays.items():
            file.put(name, np.asarray(array.read(), array.dtype))
    return file.entry


def finish(folder: str, entries: Sequence[dict[str, Any]]) -> None:
    """Lists the files of all ranks, in rank order."""
    listed: dict[str, Any] = {"files": list(entries)}
    text = json.dumps({**listed, "sha256": checksums.of_fields(listed)}, indent=1)
    durable.write(durable.join(folder, _LIST), text.encode())


class Folder:
    """The files that `world_size` ranks have written; `identity` is the SHA-256 of their list."""

    def __init__(self, folder: str, world_size: int):
        self._folder, path = folder, durable.join(folder, _LIST)
        try:
            listed = json.loads(durable.read(path))
            self.identity: str = listed["sha256"]
            self._entries: list[dict[str, Any]] = listed["files"]
            names = [entry["file"] for entry in self._entries]
            ranks = range(min(world_size, len(names) + 1))  # the number may be damaged
            required = [f"{rank}-of-{world_size}.npz" for rank in ranks]
            if self.identity != checksums.of_fields(listed) or names != required:
                raise ValueError(f"files {names!r:.200} of another save, or another SHA-256")
            for entry in self._entries:
                if entry.keys() != _FIELDS:
                    raise ValueError(f"the fields {sorted(entry)} of another version; save again")
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            what = f"be a list of files with {sorted(_FIELDS)} of each"
            raise durable.wrong(path, what, error) from error
        for rank, name in enumerate(names):
            if not durable.exists(durable.join(folder, name)):
                raise FileNotFoundError(
                    f"A file that rank {rank} has written must lie beside the file that is read. "
                    f"Received: no file {durable.join(folder, name)}"
                )

    def check(self, ranks: Iterable[int]) -> None:
        """Raises ValueError unless the files of these ranks have the checksum in the list."""
        for rank in ranks:
            checksums.check_bytes(self._folder, self._entries[rank], rank)

    @contextlib.contextmanager
    def open(self, rank: int) -> Iterator[Any]:
        """The arrays of one rank, as by `np.load`; ValueError, with the file, for damaged bytes."""
        path = durable.join(self._folder, self._entries[rank]["file"])
        try:
            with durable.open_to_read(path) as file, np.load(file, allow_pickle=False) as archive:
                yield archive
        except Exception as error:  # zipfile and NumPy raise undocumented errors for damaged bytes
            received = f"{type(error).__name__}: {error}"
            raise durable.wrong(path, "be a whole file of arrays", received) from error
