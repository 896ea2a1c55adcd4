"""Arrays of all ranks in one folder, a file of each rank, in NumPy's format.

    dense.3f2a/0-of-2.npz      the arrays of rank 0, uncompressed
    dense.3f2a/1-of-2.npz
    dense.3f2a/files.json      size and SHA-256 of each file, and a SHA-256 of the list itself

Folders of version 0.1 have no list. There the CRC-32 of each array is all that is checked.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import zipfile
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np

from sok_like.saving.format import durable, manifest

_LIST = "files.json"


def file_of(folder: str, rank: int, world_size: int) -> str:
    """The path of one rank's file."""
    return durable.join(folder, f"{rank}-of-{world_size}.npz")


def write(
    folder: str, rank: int, world_size: int, arrays: Iterable[tuple[str, np.ndarray]]
) -> dict[str, Any]:
    """Writes one rank's file and flushes it to the disk.

    Args:
        arrays: Names and values; values are taken one after the other.

    Returns:
        `file`, `bytes` and `sha256`.

    Raises:
        OSError: names the file.
    """
    path = file_of(folder, rank, world_size)
    durable.make_folder(folder)
    with durable.written(path) as file:
        sink = _Hashed(file)
        with zipfile.ZipFile(sink, "w") as archive:  # type: ignore[call-overload]
            for name, array in arrays:
                with archive.open(f"{name}.npy", "w", force_zip64=True) as member:
                    np.lib.format.write_array(member, np.asarray(array), allow_pickle=False)
    name = f"{rank}-of-{world_size}.npz"
    return {"file": name, "bytes": sink.bytes, "sha256": sink.digest.hexdigest()}


class _Hashed:
    """A file that is hashed while zipfile writes it; it cannot seek."""

    def __init__(self, file):
        self._file, self.bytes, self.digest = file, 0, hashlib.sha256()

    def write(self, data):
        left = memoryview(data)
        while left:
            left = left[self._file.write(left) :]
        self.digest.update(data)
        self.bytes += len(data)
        return len(data)

    def flush(self):
        self._file.flush()


def finish(folder: str, entries: Sequence[dict[str, Any]]) -> None:
    """Lists the files of all ranks, in rank order."""
    listed = {"files": list(entries)}
    text = json.dumps({**listed, "sha256": _checksum(listed)}, indent=1)
    durable.write(durable.join(folder, _LIST), text.encode())


def _checksum(listed):
    return hashlib.sha256(json.dumps(listed, sort_keys=True).encode()).hexdigest()


class Folder:
    """The files that `world_size` ranks have written.

    Args:
        listed: Whether the list must be there; False for files of version 0.1.

    Attributes:
        identity: The list's SHA-256; "" without one.

    Raises:
        OSError: a file is missing.
        ValueError: the list is damaged.
    """

    def __init__(self, folder: str, world_size: int, listed: bool):
        self._folder, self.world_size, self.identity = folder, world_size, ""
        self._entries: list[dict[str, Any]] = []
        if listed:
            self._read_list(durable.join(folder, _LIST))
        for rank in range(world_size):
            if not durable.exists(file_of(folder, rank, world_size)):
                raise FileNotFoundError(
                    f"A file that rank {rank} has written must lie beside the file that is read. "
                    f"Received: no file {file_of(folder, rank, world_size)}"
                )

    def _read_list(self, path):
        try:
            found = json.loads(durable.read(path))
            self.identity, self._entries = found.pop("sha256"), found["files"]
            names = [each["file"] for each in self._entries]
            ranks = range(self.world_size)
            known = [f"{rank}-of-{self.world_size}.npz" for rank in ranks]
            if self.identity != _checksum(found) or names != known:
                raise ValueError(f"files {names!r:.200} of another save, or another SHA-256")
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise ValueError(f"{path} must be a list of files. Received: {error}") from error

    def check(self, ranks: Iterable[int]) -> None:
        """Raises ValueError unless the files of these ranks have the SHA-256 in the list."""
        if self._entries:
            for rank in ranks:
                manifest.check_bytes(self._folder, self._entries[rank], rank)

    @contextlib.contextmanager
    def open(self, rank: int) -> Iterator[Any]:
        """The arrays of one rank, as `np.load` opens them; reading one checks its CRC-32.

        Raises:
            ValueError: the file is damaged; names the file. So does an error within the scope.
        """
        path = file_of(self._folder, rank, self.world_size)
        try:
            with durable.open_to_read(path) as file, np.load(file, allow_pickle=False) as archive:
                yield archive
        except Exception as error:  # zipfile and NumPy raise undocumented errors for damaged bytes
            text = f"{type(error).__name__}: {error}"
            raise ValueError(f"{path} must be a whole file of arrays. Received: {text}") from error
