"""The large variables of a SavedModel, written in parts by the ranks that have them.

    rank that sees rank 0's folder   =SaveV2=> PARTS/1_7.*
    another rank                     =bytes=> rank 0 =SaveV2=> PARTS/1_7.*
    rank 0                           variables/ of the SavedModel + PARTS =MergeV2Checkpoints=>

A part is a checkpoint of slices. The merged one has every variable whole, and the data files of all
parts; TensorFlow reads it as any other.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from sok_like.runtime import comm
from sok_like.runtime.agreement import agreed, send
from sok_like.saving.format import durable

_FILE_ERRORS = (OSError, tf.errors.OpError)


class Slice(NamedTuple):
    """Some rows of a variable of the SavedModel's module.

    Attributes:
        name: The attribute of the module that holds the variable.
        shape: The whole variable's.
        begin: The first of these rows.
        value: An array or a tensor, `[num_rows, ...]`.
    """

    name: str
    shape: Sequence[int]
    begin: int
    value: Any


class Parts:
    """The parts of one SavedModel, in a folder of their own. Every rank must make it.

    Args:
        make_folder: Called on rank 0; makes the folder and returns its path.
    """

    def __init__(self, make_folder: Callable[[], str]):
        self._communicator = comm.current()
        rank, self._number = self._communicator.rank, 0
        self._prefixes: list[str] = []
        self.folder: str = self._agreed(lambda: None if rank else make_folder())[0]
        self._agreed(lambda: self._leave(f"rank_{rank}"))
        seen = self._agreed(lambda: None if rank else durable.names(self.folder))[0]
        # Ranks with another file system.
        others = range(1, self._communicator.world_size)
        self._sent_by = [other for other in others if f"rank_{other}" not in seen]

    def _agreed(self, function):
        return agreed(function, self._communicator, "sok.export_saved_model", ValueError)

    def _leave(self, name):
        """Leaves a file, if the folder is there and may be written."""
        with contextlib.suppress(*_FILE_ERRORS):
            if durable.exists(self.folder):
                tf.io.write_file(durable.join(self.folder, name), "")

    def write(self, make: Callable[[], Iterable[Slice]]) -> None:
        """Writes slices; every rank must call it, with other slices or with none.

        Raises:
            ValueError: what `make` raises, or a part cannot be written; on all ranks.
        """
        rank, slices = self._communicator.rank, []
        prefix = durable.join(self.folder, f"{{}}_{self._number}")
        self._number += 1

        def begin():
            slices.extend(make())
            if rank not in self._sent_by:
                return _save(prefix.format(rank), slices)
            slices[:] = [each._replace(value=np.asarray(each.value)) for each in slices]
            return None

        self._prefixes += filter(None, self._agreed(begin))
        for source in self._sent_by:
            self._prefixes += filter(None, self._sent(source, slices, prefix.format(source)))

    def _sent(self, source, slices, prefix):
        """Writes the slices of another rank on rank 0."""
        rank, mine = self._communicator.rank, []
        if rank == source:
            mine = slices
        about = self._agreed(lambda: [_about(each) for each in mine])[source]
        blocks = [_words(each.value) for each in mine]
        block = np.concatenate([np.zeros(0, np.int64), *blocks])
        received = send(block, self._communicator, False, "parts of an export")

        def save():
            return None if rank else _save(prefix, _slices(about, received))

        return self._agreed(save)

    def merge(self, path: str) -> None:
        """Adds all parts to the variables of the SavedModel at `path`; rank 0 calls it."""
        if not self._prefixes:
            return
        variables = durable.join(path, "variables")
        for name in durable.names(variables):
            tf.io.gfile.rename(durable.join(variables, name), durable.join(self.folder, name))
        tf.raw_ops.MergeV2Checkpoints(
            checkpoint_prefixes=[durable.join(self.folder, "variables"), *self._prefixes],
            destination_prefix=durable.join(variables, "variables"),
            delete_old_dirs=False,
        )

    def remove(self) -> None:
        """Removes what is left of the parts."""
        if self._communicator.rank == 0:
            durable.remove_folder(self.folder)


def _save(prefix, slices):
    """Writes a checkpoint; returns its prefix, or None without slices."""
    if not slices:
        return None
    specs = []
    for each in slices:
        whole = " ".join(map(str, each.shape))
        rest = ":-" * (len(each.shape) - 1)
        specs.append(f"{whole} {each.begin},{len(each.value)}{rest}")
    tf.raw_ops.SaveV2(
        prefix=prefix,
        tensor_names=[f"{each.name}/.ATTRIBUTES/VARIABLE_VALUE" for each in slices],
        shape_and_slices=specs,
        tensors=[tf.convert_to_tensor(each.value) for each in slices],
    )
    return prefix


def _about(each):
    value = each.value
    return [each.name, list(each.shape), each.begin, list(value.shape), value.dtype.name]


def _words(array):
    """The bytes of an array as int64, filled up by zeros."""
    data = np.ascontiguousarray(array).view(np.uint8).reshape(-1)
    return np.pad(data, (0, -len(data) % 8)).view(np.int64)


def _slices(about, words):
    """The inverse of `_about` and `_words`."""
    data, at, found = words.view(np.uint8), 0, []
    for name, whole, begin, shape, dtype in about:
        kind = np.dtype(tf.as_dtype(dtype).as_numpy_dtype)
        size = int(np.prod(shape)) * kind.itemsize
        value = data[at : at + size].view(kind).reshape(shape)
        found.append(Slice(name, whole, begin, value))
        at += -(-size // 8) * 8
    return found
