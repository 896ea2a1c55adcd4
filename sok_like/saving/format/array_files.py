"""Arrays of all ranks in one folder, a file of each rank, in NumPy's format.

    dense.3f2a/0-of-2.npz      the arrays of rank 0, uncompressed
    dense.3f2a/1-of-2.npz
    dense.3f2a/files.json      size and checksum of each file, and a SHA-256 of the list itself

Lists of version 0.1 have the SHA-256 of each file, and its first folders have no list: there the
CRC-32 of each array is all that is checked.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from sok_like.saving.format import array_file, durable, manifest

_LIST = "files.json"


def file_of(folder: str, rank: int, world_size: int) -> str:
    """The path of one rank's file."""
    return durable.join(folder, f"{rank}-of-{world_size}.npz")


class Unread(NamedTuple):
    """An array that is read when it is written."""

    shape: tuple[int, ...]
    dtype: Any
    read: Callable[[], Any]


def write(folder: str, rank: int, world_size: int, arrays: Mapping[str, Unread]) -> dict[str, Any]:
    """Writes one rank's file; returns its entry in the list."""
    shapes = {name: array[:2] for name, array in arrays.items()}
    with array_file.written(folder, f"{rank}-of-{world_size}.npz", shapes) as file:
        for name, array in arrays.items():
            file.put(name, np.asarray(array.read()))
    return file.entry


def finish(folder: str, entries: Sequence[dict[str, Any]]) -> None:
    """Lists the files of all ranks, in rank order."""
    listed = {"files": list(entries)}
    text = json.dumps({**listed, "sha256": _checksum(listed)}, indent=1)
    durable.write(durable.join(folder, _LIST), text.encode())


def _checksum(listed):
    return hashlib.sha256(json.dumps(listed, sort_keys=True).encode()).hexdigest()


class Folder:
    """The files that `world_size` ranks have written; `identity` is the list's SHA-256.

    Version 0.1 wrote some that are not `listed`. Raises OSError if a file is missing, ValueError if
    the list is damaged.
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
        """Raises ValueError unless the files of these ranks have the checksum in the list."""
        if self._entries:
            for rank in ranks:
                manifest.check_bytes(self._folder, self._entries[rank], rank)

    @contextlib.contextmanager
    def open(self, rank: int) -> Iterator[Any]:
        """The arrays of one rank, as `np.load` opens them; reading one checks its CRC-32.

        Damaged bytes, and any error within the scope, raise ValueError, which names the file.
        """
        path = file_of(self._folder, rank, self.world_size)
        try:
            with durable.open_to_read(path) as file, np.load(file, allow_pickle=False) as archive:
                yield archive
        except Exception as error:  # zipfile and NumPy raise undocumented errors for damaged bytes
            text = f"{type(error).__name__}: {error}"
            raise ValueError(f"{path} must be a whole file of arrays. Received: {text}") from error
