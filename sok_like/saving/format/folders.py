"""Folders that ranks write into: those beside a file, which are removed, and who may write.

    model.keras
    model.keras.tables/user.3f2a9c0b60d71e54/     a folder; `user.3f2a9c0b60d71e54` is its reference

The file says which folders belong to it. A file may come from anywhere, so a reference is one plain
name, and links are not followed: nothing outside of `.tables` is read or removed.

A folder that a living job writes into is not written by a second one. The job locks the folder
itself, so there is no file more in it. The system frees the lock however the process ends. Who only
reads asks for no lock. Of a job's ranks one holds it, for all. Object stores, and file systems that
lock no folders, do not know such locks: nothing is refused there.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import pathlib
import re
import secrets
import weakref
from collections.abc import Iterable
from typing import Any

from sok_like.saving.format import durable, manifest

_SUFFIX = ".tables"
_OURS = re.compile(r".+\.[0-9a-f]{16}")
# References of the last save to a path, by this process.
_latest: dict[str, set[str]] = {}


def new_reference(name: str) -> str:
    """A new, unique name of a folder."""
    return f"{manifest.file_stem(name)}.{secrets.randbits(62):016x}"


def folder_of(path: str, reference: str) -> str:
    """The folder of one part beside the file at `path`."""
    beside = path + _SUFFIX
    if reference in ("", ".", "..") or re.search(r"[/\\\0]", reference):
        required = f"refer to a folder in {beside} by one plain name"
        raise durable.wrong("A file", required, f"{reference!r:.200}")
    folder = durable.join(beside, reference)
    local = durable.local(folder)
    if local is not None:
        files = [durable.join(local, name) for name in durable.names(local)]
        for place in filter(os.path.islink, [os.path.dirname(local), local, *files]):
            received = f"{place}, a link to {os.readlink(place)}"
            raise durable.wrong(f"What lies in {beside}", "be no link", received)
    return folder


def remove(path: str, references: Iterable[str]) -> None:
    """Removes some folders beside a file."""
    for reference in references:
        _remove(durable.join(path + _SUFFIX, reference))
    if not durable.names(path + _SUFFIX):
        _remove(path + _SUFFIX)


def remove_all(path: str) -> None:
    """Removes all folders beside a file that is gone, or that needs none."""
    _remove(path + _SUFFIX)


def may_name(path: str, references: Iterable[str]) -> None:
    """Called before the file is replaced: whatever comes now, it names the new ones or the old."""
    if path in _latest:
        _latest[path] |= set(references)


def remove_others(path: str, references: Iterable[str]) -> None:
    """Removes the folders of earlier saves; `references` are those of the last one."""
    references = set(references)
    kept = set(references)
    # Those beside a file; not what others have put there.
    present = {name for name in durable.names(path + _SUFFIX) if _OURS.fullmatch(name)}
    # Keras' BackupAndRestore(double_checkpoint=True) has copied the file, which needs its folders.
    if durable.exists(f"{path}.bkp"):
        kept |= _latest.get(path, present)
    remove(path, present - kept)
    _latest[path] = references


def _remove(folder):
    with contextlib.suppress(OSError):  # also of a link; the next save tries again
        durable.remove_folder(folder)


# ---- a folder is written by one job ----

_locks: weakref.WeakValueDictionary[tuple[int, int], Lock] = weakref.WeakValueDictionary()


class Lock:
    """The lock of a folder, until this object is deleted or the process ends."""

    def __init__(self, descriptor: int):
        self.descriptor = descriptor

    def __del__(self):
        os.close(self.descriptor)


def lock(folder: Any, argument: str) -> Lock | None:
    """Locks a folder for this process, if it can be locked; RuntimeError if another one has it."""
    path = durable.local(folder)
    if path is None:
        return None
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        about = os.fstat(descriptor)
        place = about.st_dev, about.st_ino
        held = _locks.get(place)
        if held is None:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            held = _locks[place] = Lock(os.dup(descriptor))
        return held
    except BlockingIOError:
        raise RuntimeError(
            f"`{argument}` must be a folder into which no other job writes. Received: "
            f"{os.fspath(folder)!r}, which {_holder(about)} uses; end it, or take another folder"
        ) from None
    except OSError:
        return None
    finally:
        os.close(descriptor)


def _holder(about):
    """The process that holds a folder's lock, in words."""
    try:
        locks = pathlib.Path("/proc/locks").read_text()
        inode = f"{os.major(about.st_dev):02x}:{os.minor(about.st_dev):02x}:{about.st_ino}"
        pid = re.search(rf"FLOCK .* (\d+) {inode} ", locks)[1]
        line = pathlib.Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace")
    except (OSError, TypeError):
        return "a process outside this container or host"
    return f"process {pid} ({' '.join(line.split(chr(0))).strip():.200})"


def _leave_to_parent():
    """A child of `fork` must not keep the lock when its parent has ended."""
    for held in list(_locks.values()):
        os.close(held.descriptor)
        held.descriptor = os.open(os.devnull, os.O_RDONLY)  # for `__del__`
    _locks.clear()  # nor take it for its own, where it asks for the folder itself


os.register_at_fork(after_in_child=_leave_to_parent)
