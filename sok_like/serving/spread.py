"""Variables beside hash tables of which ranks hold slices: each rank writes its own.

While the model is traced, on rank 0, a variable with a shape and no value stands for each of them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import tensorflow as tf

from sok_like.lookup.stock_table import without_value
from sok_like.runtime import comm
from sok_like.runtime.agreement import agreed
from sok_like.serving import contents
from sok_like.serving.parts import Parts, Rows, Slice, key_of

# Of which TensorFlow reads slices; a tensor of another dtype must be written whole.
_SLICED = {
    *(tf.float32, tf.float64, tf.bfloat16, tf.int8, tf.int16, tf.int32, tf.int64),
    *(tf.uint8, tf.bool, tf.complex64, tf.complex128),
}


class SpreadVariables:
    """Those of a model. Every rank must make it, and call its methods.

    Args:
        variables: The model's variables.
    """

    def __init__(self, model: Any, variables: Iterable[Any]):
        self._holders = [
            (id(each), each.spread_for_export()) for each in contents.holders_of(model)
        ]
        self._sharded = [each for each in variables if hasattr(each, "_sok_shard")]
        found = [each for _, of_holder in self._holders for each in of_holder.values()]
        found += [each.spread_for_export() for each in self._sharded]

        def tell():
            return [[list(s.shape), None if s.dtype is None else s.dtype.name] for s in found]

        told = agreed(tell, comm.current(), raises=ValueError)
        shapes = [[shape for shape, _ in of_rank] for of_rank in told]
        if any(other != shapes[0] for other in shapes):
            raise ValueError(
                "Every rank must export a model with the same tables. Received, by rank: sharded "
                f"ones of the shapes {shapes}"
            )
        self._found = {}
        for number, each in enumerate(found):
            dtype = next(filter(None, (of_rank[number][1] for of_rank in told)))
            self._found[f"spread_{number}"] = each._replace(dtype=tf.as_dtype(dtype))

    @contextlib.contextmanager
    def replaced(
        self,
    ) -> Iterator[tuple[dict[int, dict[str, tf.Variable]], dict[str, tf.Variable]]]:
        """A scope in which variables without values stand for these, on rank 0.

        Yields:
            What replaces the tables of layers, by the layer's `id`; and all replacements, by name.
        """
        if comm.current().rank:
            yield {}, {}
            return
        made = {
            name: without_value(each.shape, each.dtype, name) for name, each in self._found.items()
        }
        left = iter(made.values())
        of_holders = {key: {k: next(left) for k in found} for key, found in self._holders}
        for variable in self._sharded:
            variable._sok_held = next(left)
        try:
            yield of_holders, made
        finally:
            for variable in self._sharded:
                variable._sok_held = None

    def rows(self, parts: Parts, names: Iterable[str]) -> list[Rows]:
        """What this rank writes of these variables, under the name that a SavedModel has."""
        return [self._rows(parts, name) for name in names]

    def _rows(self, parts, name):
        spread, key = self._found[name], key_of(name)
        row_bytes = spread.dtype.size * int(np.prod(spread.shape[1:]))

        def slices(start, stop):
            begin = spread.begin[0] + start, *spread.begin[1:]
            yield Slice(key, spread.shape, begin, spread.read(start, stop))

        mine = Rows(spread.num_rows, row_bytes, slices)
        if spread.dtype in _SLICED and all(spread.shape):
            return mine
        is_writer = comm.current().rank == 0
        whole = np.empty(spread.shape if is_writer else [0], spread.dtype.as_numpy_dtype)

        def take(each):
            bounds = zip(each.begin, each.value.shape, strict=True)
            whole[tuple(slice(at, at + size) for at, size in bounds)] = each.value

        parts.gather([mine], take)
        return Rows(int(is_writer), 0, lambda *_: [Slice(key, spread.shape, (), whole)])
