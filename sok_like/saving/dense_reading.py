"""Reads dense tables from files of any number of ranks; each reader takes its own slices."""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from sok_like.saving.dense_pieces import KEY, Holder, Part, blocks_of, file_of


class Reading:
    """The dense tables of one save.

    Args:
        found: By holder's id and part's key: the shape of the whole, and a list of blocks. A block
            has a range of rows, a range of columns, and a function that reads it.
    """

    def __init__(self, found: Mapping[tuple[str, str], tuple[tuple[int, int], list[Any]]]):
        self._found = found

    @classmethod
    def of_checkpoint(cls, path: str, folder: str | None) -> Reading:
        """Of a checkpoint, and of the folder beside it if several ranks wrote that."""
        reader = tf.train.load_checkpoint(path)
        if folder is not None:
            return cls.of_folder(folder, json.loads(reader.get_tensor(KEY))["world_size"])
        found = {}
        for name, shape in reader.get_variable_to_shape_map().items():
            if name.startswith(f"{KEY}/"):
                holder, key = name.removeprefix(f"{KEY}/").split("/")
                whole = (0, shape[0], 0, shape[1], functools.partial(reader.get_tensor, name))
                found[holder, key] = (shape[0], shape[1]), [whole]
        return cls(found)

    @classmethod
    def of_folder(cls, folder: str, world_size: int) -> Reading:
        """Of the files of `world_size` ranks.

        Raises:
            OSError: a file is missing, or is not in NumPy's format.
        """
        found: dict[tuple[str, str], tuple[tuple[int, int], list[Any]]] = {}
        for rank in range(world_size):
            archive = np.load(file_of(folder, rank, world_size))
            for name in archive.files:
                holder, key, *numbers = name.split(",")
                rows, columns, *slice_ = map(int, numbers)
                blocks = found.setdefault((holder, key), ((rows, columns), []))[1]
                blocks.append((*slice_, functools.partial(archive.__getitem__, name)))
        return cls(found)

    @classmethod
    def of_wholes(cls, holder_id: str, wholes: Any, parts: Sequence[Part]) -> Reading:
        """Of a mapping of whole tables and slot variables; keeps what the parts need."""
        found, slices = {}, {part.key: (part.rows, part.columns) for part in parts}
        for key in wholes.keys():
            whole, mine = np.asarray(wholes[key]), []
            if key.split(".")[0] in slices:
                rows, columns = slices[key.split(".")[0]]
                value = np.array(whole[slice(*rows), slice(*columns)])
                mine = [(*rows, *columns, functools.partial(np.asarray, value))]
            found[holder_id, key] = (*whole.shape, 1, 1)[:2], mine
        return cls(found)

    def check_tables(self, holder: Holder, read_as: str, parts: Sequence[Part]) -> None:
        """Raises ValueError unless a holder's tables are the same and its parts are complete.

        Args:
            read_as: The holder's id in the save.
            parts: The parts of this rank.
        """
        received = {
            key: tuple(shape)
            for (name, key), (shape, _) in self._found.items()
            if name == read_as and "." not in key
        }
        expected = holder.shapes()
        if received.keys() != expected.keys():
            missing, more = (sorted(a.keys() - b.keys(), key=int) for a, b in
                             ((expected, received), (received, expected)))  # fmt: skip
            raise ValueError(
                f"A checkpoint must have the tables of layer '{holder.name}'. Received: one "
                f"without tables {missing} and with extra tables {more} (numbers in `embeddings`)"
            )
        for key, shape in expected.items():  # checks all tables, so that ranks agree
            if received[key] != shape:
                raise ValueError(
                    f"A checkpoint must have the tables of layer '{holder.name}' in their shapes. "
                    f"Received: '{key}' of shape {received[key]} for a table of shape {shape}"
                )
        for part in parts:
            self._check_part(holder, read_as, part)

    def slot_names(self, read_as: str) -> set[str]:
        """The names of the holder's slot variables in the save."""
        keys = [key for name, key in self._found if name == read_as]
        return {key.partition(".")[2] for key in keys if "." in key}

    def check_slots(self, holder: Holder, read_as: str, parts: Sequence[Part]) -> None:
        """Raises ValueError if the save has slot variables, but not all of those of the parts."""
        missing = sorted({part.key for part in parts if (read_as, part.key) not in self._found})
        names = self.slot_names(read_as)
        if missing and names:
            raise ValueError(
                f"A checkpoint must have the optimizer's slot variables of layer '{holder.name}'. "
                f"Received: one without {missing}"
            )
        for part in parts if names else ():
            self._check_part(holder, read_as, part)

    def _check_part(self, holder, read_as, part):
        blocks = self._found[read_as, part.key][1]
        held = sum(_common((a, b), part.rows) * _common((c, d), part.columns)
                   for a, b, c, d, _ in blocks)  # fmt: skip
        if held != _common(part.rows, part.rows) * _common(part.columns, part.columns):
            raise ValueError(f"Rows of '{part.key}' of layer '{holder.name}' are missing.")

    def restore(self, read_as: str, parts: Sequence[Part]) -> None:
        """Copies parts to this rank's variables; `read_as` is their holder's id in the save."""
        for part in parts:
            _, blocks = self._found.get((read_as, part.key), (None, None))
            for start, stop in blocks_of(part) if blocks else ():
                self._copy(blocks, part, start, stop)

    def _copy(self, blocks, part, start, stop):
        left, right = part.columns
        rows: Any = None
        for a, b, c, d, read in blocks:
            low, high, first, last = max(a, start), min(b, stop), max(c, left), min(d, right)
            if low < high and first < last:
                block = read()[low - a : high - a, first - c : last - c]
                if rows is None:
                    rows = np.empty([stop - start, right - left], block.dtype)
                rows[low - start : high - start, first - left : last - left] = block
        offset = part.first_row - part.rows[0]
        tf.raw_ops.ResourceScatterUpdate(
            resource=part.variable.handle,
            indices=tf.range(start + offset, stop + offset, dtype=tf.int64),
            updates=tf.cast(rows, part.variable.dtype),
        )


def _common(one, other):
    return max(0, min(one[1], other[1]) - max(one[0], other[0]))
