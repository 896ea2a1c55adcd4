"""The folders beside a file of several ranks: their names, and which of them are removed.

    model.keras
    model.keras.tables/user.3f2a9c0b60d71e54/     a folder; `user.3f2a9c0b60d71e54` is its reference

The file says which folders belong to it. A file may come from anywhere, so a reference is one plain
name, and links are not followed: nothing outside of `.tables` is read or removed.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
from collections.abc import Iterable

from sok_like.saving.format import durable, manifest

_SUFFIX = ".tables"
_OURS = re.compile(r".+\.[0-9a-f]{16}")


def new_reference(name: str) -> str:
    """A new, unique name of a folder."""
    return f"{manifest.file_stem(name)}.{secrets.randbits(62):016x}"


def folder_of(path: str, reference: str) -> str:
    """The folder of one part beside the file at `path`."""
    if reference in ("", ".", "..") or re.search(r"[/\\\0]", reference):
        raise ValueError(
            f"A file must refer to a folder in {path + _SUFFIX} by one plain name. "
            f"Received: {reference!r:.200}"
        )
    folder = durable.join(path + _SUFFIX, reference)
    local = durable.local(folder)
    files = [durable.join(local, name) for name in durable.names(local)] if local else []
    for each in [os.path.dirname(local), local, *files] if local else []:
        if os.path.islink(each):
            raise ValueError(
                f"What lies in {path + _SUFFIX} must be no link. Received: {each}, a link to "
                f"{os.readlink(each)}"
            )
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
    references, present = set(references), _references_in(path)
    kept = set(references)
    # Keras' BackupAndRestore(double_checkpoint=True) has copied the file, which needs its folders.
    if durable.exists(f"{path}.bkp"):
        kept |= _latest.get(path, present)
    remove(path, present - kept)
    _latest[path] = references


def _remove(folder):
    with contextlib.suppress(OSError):  # also of a link; the next save tries again
        durable.remove_folder(folder)


def _references_in(path):
    """The folders beside a file; not what others have put there."""
    return {name for name in durable.names(path + _SUFFIX) if _OURS.fullmatch(name)}


# References of the last save to a path, by this process.
_latest: dict[str, set[str]] = {}
