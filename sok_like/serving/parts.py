"""The large tensors of a SavedModel or a delta, written in parts by the ranks that have them.

    rank that sees rank 0's folder   =SaveV2=> PARTS/1_7.*
    another rank                     =bytes=> rank 0 =SaveV2=> PARTS/1_7.*
    rank 0                           variables/ of the SavedModel + PARTS =MergeV2Checkpoints=>

A part is a checkpoint of slices. The merged one has every tensor whole, and the data files of all
parts; TensorFlow reads it as any other.
"""

from __future__ import annotations

import contextlib
import functools
import secrets
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from sok_like.runtime import comm
from sok_like.runtime.agreement import agreed, send
from sok_like.saving.format import durable
from sok_like.serving import contents

_FILE_ERRORS = (OSError, tf.errors.OpError)


def key_of(attribute: str) -> str:
    """The name in a SavedModel's checkpoint of a variable that is an attribute of its module."""
    return f"{attribute}/.ATTRIBUTES/VARIABLE_VALUE"


class Slice(NamedTuple):
    """A slice of a tensor of the checkpoint.

    Attributes:
        name: The tensor's name.
        shape: The whole tensor's.
        begin: The first index of the slice along each axis; 0 along the axes that are left out.
        value: An array or a tensor.
    """

    name: str
    shape: Sequence[int]
    begin: Sequence[int]
    value: Any


class Rows(NamedTuple):
    """Rows that this rank writes, some at a time.

    Attributes:
        num_rows: Number of rows.
        row_bytes: Bytes of one.
        slices: Called with the first of some rows and the one after the last.
    """

    num_rows: int
    row_bytes: int
    slices: Callable[[int, int], Iterable[Slice]]


class Parts:
    """The parts of one checkpoint, in a folder of their own. Every rank must make it.

    Args:
        path: What they become; the folder is beside it.
        call: The call of the user.
    """

    def __init__(self, path: str, call: str):
        self._communicator = comm.current()
        rank, self._number, self._path, self._call = self._communicator.rank, 0, path, call
        self._prefixes: list[str] = []

        def make():
            if rank:
                return None
            aside = f"{path.rstrip('/')}.{secrets.token_hex(4)}"
            with self._writing():
                durable.make_folder(aside)
            return aside

        self.folder: str = self._agreed(make)[0]
        self._agreed(lambda: self._leave(f"rank_{rank}"))
        seen = self._agreed(lambda: None if rank else durable.names(self.folder))[0]
        # Ranks with another file system.
        others = range(1, self._communicator.world_size)
        self._sent_by = [other for other in others if f"rank_{other}" not in seen]

    def __len__(self):
        return len(self._prefixes)

    def _agreed(self, function):
        return agreed(function, self._communicator, self._call, ValueError)

    @contextlib.contextmanager
    def _writing(self):
        try:
            yield
        except _FILE_ERRORS as error:
            raise ValueError(f"{self._path} could not be written: {error}") from error

    def _leave(self, name):
        """Leaves a file, if the folder is there and may be written."""
        with contextlib.suppress(*_FILE_ERRORS):
            if durable.exists(self.folder):
                tf.io.write_file(durable.join(self.folder, name), "")

    def write_rows(self, rows: Iterable[Rows]) -> None:
        """Writes rows, at most `contents.CHUNK_BYTES` at once; every rank must call it.

        Raises:
            ValueError: as `write`.
        """
        for make in self._pieces(rows):
            self.write(make)

    def write(self, make: Callable[[], Iterable[Slice]]) -> None:
        """Writes slices; every rank must call it, with other slices or with none.

        Raises:
            ValueError: what `make` raises, or a part cannot be written; on all ranks.
        """
        rank = self._communicator.rank
        slices: list[Slice] = []
        prefix = durable.join(self.folder, f"{{}}_{self._number}")
        self._number += 1

        def begin():
            slices.extend(make())
            return self._save(prefix.format(rank), () if rank in self._sent_by else slices)

        self._prefixes += filter(None, self._agreed(begin))
        for source in self._sent_by:
            sent = self._sent(source, slices)
            save = functools.partial(self._save, prefix.format(source), sent)
            self._prefixes += filter(None, self._agreed(save))

    def gather(self, rows: Iterable[Rows], take: Callable[[Slice], None]) -> None:
        """Sends rows to rank 0 instead; every rank must call it.

        Args:
            take: Called on rank 0 for each slice of any rank.
        """
        for make in self._pieces(rows):
            slices: list[Slice] = []
            self._agreed(lambda: slices.extend(make()))  # noqa: B023
            for source in range(self._communicator.world_size):
                for each in self._sent(source, slices):
                    take(each)

    def _pieces(self, rows):
        """Functions that make slices, as many as on the rank that has the most."""
        pieces = list(_pieces(rows))
        for number in range(max(self._agreed(lambda: len(pieces)))):
            yield functools.partial(_slices_of, *pieces[number : number + 1])

    def _sent(self, source, slices):
        """The slices of a rank, on rank 0; elsewhere none."""
        mine: list[Slice] = []

        def tell():
            if self._communicator.rank == source:
                mine.extend(each._replace(value=np.asarray(each.value)) for each in slices)
            return [_about(each) for each in mine]

        about = self._agreed(tell)[source]
        blocks = [_words(each.value) for each in mine]
        block = np.concatenate([np.zeros(0, np.int64), *blocks])
        received = send(block, self._communicator, False, "parts of an export")
        return [] if self._communicator.rank else _slices(about, received)

    def _save(self, prefix, slices):
        if not slices:
            return None
        with self._writing():
            _save(prefix, slices)
        return prefix

    def merge(self, prefix: str, more: str | None = None) -> None:
        """Makes one checkpoint of all parts; rank 0 calls it.

        Args:
            more: The prefix of another checkpoint that becomes part of it.
        """
        with self._writing():
            tf.raw_ops.MergeV2Checkpoints(
                checkpoint_prefixes=[*([more] if more else []), *self._prefixes],
                destination_prefix=prefix,
                delete_old_dirs=False,
            )

    def remove(self) -> None:
        """Removes what is left of the parts."""
        if self._communicator.rank == 0:
            durable.remove_folder(self.folder)


def _pieces(all_rows) -> Iterator[list[tuple[Rows, int, int]]]:
    """Rows in pieces of about `contents.CHUNK_BYTES`, each at least one row."""
    piece: list[tuple[Rows, int, int]] = []
    left = contents.CHUNK_BYTES
    for rows in all_rows:
        at, size = 0, max(1, rows.row_bytes)
        while at < rows.num_rows:
            if piece and left < size:
                yield piece
                piece, left = [], contents.CHUNK_BYTES
            end = min(rows.num_rows, at + max(1, left // size))
            piece.append((rows, at, end))
            left, at = left - (end - at) * size, end
    if piece:
        yield piece


def _slices_of(piece=()):
    return [each for rows, at, end in piece for each in rows.slices(at, end)]


def _save(prefix, slices):
    """Writes a checkpoint."""
    specs = []
    for _, shape, begin, value in slices:
        bounds = zip([*begin, *[0] * len(shape)], value.shape, shape, strict=False)
        axes = ["-" if size == whole else f"{at},{size}" for at, size, whole in bounds]
        is_whole = set(axes) <= {"-"}  # which TensorFlow reads without a copy, of any dtype
        specs.append("" if is_whole else f"{' '.join(map(str, shape))} {':'.join(axes)}")
    tf.raw_ops.SaveV2(
        prefix=prefix,
        tensor_names=[each.name for each in slices],
        shape_and_slices=specs,
        tensors=[tf.convert_to_tensor(each.value) for each in slices],
    )


def _about(each):
    value = each.value
    begin = [int(at) for at in each.begin]
    return [each.name, list(each.shape), begin, list(value.shape), value.dtype.name]


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
