"""A folder that a living job writes into is not written by a second one.

The job locks the folder itself, so there is no file more in it. The system frees the lock however
the process ends. Who only reads asks for no lock. Of a job's ranks one holds it, for all. Object
stores, and file systems that lock no folders, do not know such locks: nothing is refused there.
"""

from __future__ import annotations

import fcntl
import os
import pathlib
import re
import weakref
from typing import Any

from sok_like.saving.format import durable

_locks: weakref.WeakValueDictionary[tuple[int, int], Lock] = weakref.WeakValueDictionary()


class Lock:
    """The lock of a folder, until this object is deleted or the process ends."""

    def __init__(self, descriptor: int):
        self.descriptor = descriptor

    def __del__(self):
        os.close(self.descriptor)


def lock(folder: Any, argument: str) -> Lock | None:
    """Locks a folder for this process, which may lock it several times.

    None where folders cannot be locked. RuntimeError, which names the argument, if another process
    has locked it.
    """
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


os.register_at_fork(after_in_child=_leave_to_parent)
