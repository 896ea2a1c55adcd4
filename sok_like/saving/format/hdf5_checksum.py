"""Arrays of ours inside a file of Keras, with a checksum of all of them.

    vars/keys  vars/rows  ...  vars/sha256     the checksum of names, dtypes, shapes and bytes

HDF5 itself checks nothing: a flipped bit would load as another row. Version 0.1 wrote no checksum,
so arrays without one are read, too.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from typing import Any

import numpy as np

CHECKSUM = "sha256"


def write(store: Any, arrays: Iterable[tuple[str, np.ndarray]], prefix: str = "") -> None:
    """Writes arrays and their checksum into a store of Keras; names get the prefix."""
    digests = {}
    for name, array in arrays:
        store[prefix + name] = array
        digests[name] = _digest(array)
    store[prefix + CHECKSUM] = np.frombuffer(_together(digests), np.uint8)


def check(store: Any, what: str, required: bool) -> None:
    """Reads all arrays, and raises ValueError if they do not have their checksum.

    Unless it is `required`, arrays without one are as they are.
    """
    if CHECKSUM not in store.keys():
        if required:
            raise ValueError(f"The file must hold the checksum of {what}. Received: none")
        return
    found = {name: _digest(store[name]) for name in store.keys() if name != CHECKSUM}
    if np.asarray(store[CHECKSUM]).tobytes() != _together(found):
        raise ValueError(
            f"The file must hold {what} as it was written. Received: bytes with a different "
            "SHA-256; the file is damaged"
        )


def _digest(array):
    array = np.asarray(array, order="C")
    digest = hashlib.sha256(f"{array.dtype.str} {array.shape} ".encode())
    if array.size:
        digest.update(array.reshape(-1).view(np.uint8))
    return digest.hexdigest()


def _together(digests):
    lines = (f"{name} {digest}\n" for name, digest in sorted(digests.items()))
    return hashlib.sha256("".join(lines).encode()).digest()
