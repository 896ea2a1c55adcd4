"""The large tensors of a SavedModel or a delta, written in parts by the ranks that have them.

    rank that sees rank 0's folder   =SaveV2=> PARTS/1_7.*
    another rank                     =bytes=> rank 0 =SaveV2=> PARTS/1_7.*
    rank 0                           variables/ of the SavedModel + PARTS =MergeV2Checkpoints=>

A part is a checkpoint of slices. The merged one has every tensor whole, and the data files of all
parts; TensorFlow reads it as any other.

Also here: a model's variables, those of which ranks hold parts, and what stands for these in the
graph.
"""

import contextlib
import functools
import secrets
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from sok_like.lookup.stock_table import without_value
from sok_like.runtime.framework.scoped_attributes import attributes
from sok_like.runtime.ranks import comm
from sok_like.runtime.ranks.agreement import agreed, check_same, send
from sok_like.saving.format import durable
from sok_like.saving.format.progress import Progress
from sok_like.table.variable import EmbeddingVariable, unwrap

CHUNK_BYTES = 64 * 2**20  # of rows that are sent or written at once
_FILE_ERRORS = (OSError, tf.errors.OpError)
# Of which TensorFlow reads slices; a tensor of another dtype must be written whole.
_SLICED = {
    *(tf.float32, tf.float64, tf.bfloat16, tf.int8, tf.int16, tf.int32, tf.int64),
    *(tf.uint8, tf.bool, tf.complex64, tf.complex128),
}


def key_of(attribute: str) -> str:
    """The name in a SavedModel's checkpoint of a variable that is an attribute of its module."""
    return f"{attribute}/.ATTRIBUTES/VARIABLE_VALUE"


class Slice(NamedTuple):
    """A slice of a tensor of the checkpoint."""

    name: str
    shape: Sequence[int]  # of the whole tensor
    begin: Sequence[int]  # the first index along each axis; 0 along the axes that are left out
    value: Any  # an array or a tensor


class Rows(NamedTuple):
    """Rows that this rank writes, some at a time."""

    num_rows: int
    row_bytes: int  # of one
    slices: Callable[[int, int], Iterable[Slice]]  # of the first up to the second number


class Parts:
    """The parts of the checkpoint at `path`, beside it; every rank makes it and calls it."""

    def __init__(self, path: str, call: str):
        self._communicator = comm.current()
        rank, self._number, self._path, self._call = self._communicator.rank, 0, path, call
        self._prefixes: list[str] = []
        self._progress = Progress(call)

        def make():
            if rank:
                return None
            aside = f"{path.rstrip('/')}.{secrets.token_hex(4)}"
            with self._writing():
                durable.make_folder(aside)
            return aside

        self.folder: str = self._agreed(make)[0]

        def leave_file():  # if the folder is there and may be written
            with contextlib.suppress(*_FILE_ERRORS):
                if durable.exists(self.folder):
                    tf.io.write_file(durable.join(self.folder, f"rank_{rank}"), "")

        self._agreed(leave_file)
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

    def write_rows(self, rows: Iterable[Rows]) -> None:
        """Writes rows, at most `CHUNK_BYTES` at once."""
        for make in self._pieces(rows):
            self.write(make)

    def write(self, make: Callable[[], Iterable[Slice]]) -> None:
        """Writes slices: each rank others, or none. All ranks raise what one does."""
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
        """Sends rows to rank 0 instead, which calls `take` for each slice of any rank."""
        for make in self._pieces(rows):
            slices: list[Slice] = []
            self._agreed(lambda: slices.extend(make()))  # noqa: B023
            for source in range(self._communicator.world_size):
                for piece in self._sent(source, slices):
                    take(piece)

    def _pieces(self, all_rows):
        """Functions that make slices, as many as on the rank that has the most."""
        # Each has about `CHUNK_BYTES` of some ranges of rows, at least one row.
        pieces: list[list[tuple[Rows, int, int]]] = []
        left = 0
        for rows in all_rows:
            at, size = 0, max(1, rows.row_bytes)
            while at < rows.num_rows:
                if left < size:
                    pieces.append([])
                    left = CHUNK_BYTES
                end = min(rows.num_rows, at + max(1, left // size))
                pieces[-1].append((rows, at, end))
                left, at = left - (end - at) * size, end
        for number in range(max(self._agreed(lambda: len(pieces)))):
            piece = pieces[number] if number < len(pieces) else []
            yield lambda ranges=piece: [s for rows, *bounds in ranges for s in rows.slices(*bounds)]

    def _sent(self, source, slices):
        """The slices of a rank, on rank 0; elsewhere none."""
        values: list[np.ndarray] = []

        def heads():
            if self._communicator.rank != source:
                return []
            values.extend(np.asarray(one.value) for one in slices)
            return [
                [name, list(shape), [int(at) for at in begin], list(value.shape), value.dtype.name]
                for (name, shape, begin, _), value in zip(slices, values, strict=True)
            ]

        heads_of_source = self._agreed(heads)[source]
        blocks = [np.zeros(0, np.int64)]
        for value in values:  # their bytes as int64, filled up by zeros
            data = np.ascontiguousarray(value).view(np.uint8).reshape(-1)
            blocks.append(np.pad(data, (0, -len(data) % 8)).view(np.int64))
        words = send(np.concatenate(blocks), self._communicator, False, "parts of an export")
        data, at, received = words.view(np.uint8), 0, []
        if self._communicator.rank:
            return []
        for name, whole, begin, shape, dtype in heads_of_source:
            kind = np.dtype(tf.as_dtype(dtype).as_numpy_dtype)
            size = int(np.prod(shape)) * kind.itemsize
            value = data[at : at + size].view(kind).reshape(shape)
            received.append(Slice(name, whole, begin, value))
            at += -(-size // 8) * 8
        return received

    def _save(self, prefix, slices):
        if not slices:
            return None
        with self._writing():
            _save(prefix, slices)
        self._progress.add(sum(np.asarray(one.value).nbytes for one in slices))
        return prefix

    def merge(self, prefix: str, more: str | None = None) -> None:
        """Makes one checkpoint of all parts and of another one, on rank 0."""
        with self._writing():
            tf.raw_ops.MergeV2Checkpoints(
                checkpoint_prefixes=[*([more] if more else []), *self._prefixes],
                destination_prefix=prefix,
                delete_old_dirs=False,
            )

    def __enter__(self):
        return self

    def __exit__(self, *_):  # removes what is left of the parts
        self._progress.close()
        if self._communicator.rank == 0:
            durable.remove_folder(self.folder)


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
        tensor_names=[one.name for one in slices],
        shape_and_slices=specs,
        tensors=[tf.convert_to_tensor(one.value) for one in slices],
    )


def variables_of(model: Any) -> list[Any]:
    """The model's variables, including other variables that it tracks; each once."""
    tracked = tf.train.TrackableView(model).descendants()
    items = map(unwrap, [*getattr(model, "variables", ()), *tracked])
    by_id = {id(v): v for v in items if isinstance(v, tf.Variable) or is_spread(v)}
    return list(by_id.values())


def is_spread(variable: Any) -> bool:
    """Whether ranks hold parts of a variable."""
    return isinstance(variable, EmbeddingVariable) or hasattr(variable, "_sok_shard")


class SpreadVariables:
    """Variables, beside hash tables, of which ranks hold slices: each rank writes its own."""

    # While the model is traced, on rank 0, a variable without a value stands for each of them.

    def __init__(self, model: Any, variables: Iterable[Any]):
        layers = getattr(model, "_flatten_layers", lambda: ())()
        items = [*layers, *tf.train.TrackableView(model).descendants()]
        # Layers that spread their tables over ranks themselves.
        holders = {id(i): i for i in items if hasattr(i, "spread_for_export") and not is_spread(i)}
        self._holders = [(key, holder.spread_for_export()) for key, holder in holders.items()]
        self._sharded = [variable for variable in variables if hasattr(variable, "_sok_shard")]
        spreads = [spread for _, of_holder in self._holders for spread in of_holder.values()]
        spreads += [variable.spread_for_export() for variable in self._sharded]

        def facts():
            return [[list(s.shape), None if s.dtype is None else s.dtype.name] for s in spreads]

        by_rank = agreed(facts, comm.current(), raises=ValueError)
        shapes = [
            f"sharded ones of the shapes {[shape for shape, _ in facts]}" for facts in by_rank
        ]
        check_same(shapes, "Every rank must export a model with the same tables", ValueError)
        self._spreads = {}
        for number, spread in enumerate(spreads):
            dtype = next(filter(None, (of_rank[number][1] for of_rank in by_rank)))
            self._spreads[f"spread_{number}"] = spread._replace(dtype=tf.as_dtype(dtype))

    @contextlib.contextmanager
    def replaced(
        self,
    ) -> Iterator[tuple[dict[int, dict[str, tf.Variable]], dict[str, tf.Variable]]]:
        """A scope with, on rank 0, what replaces layers' tables, by `id`; and all, by name."""
        if comm.current().rank:
            yield {}, {}
            return
        replacements = {
            name: without_value(spread.shape, spread.dtype, name)
            for name, spread in self._spreads.items()
        }
        left = iter(replacements.values())
        of_holders = {key: {k: next(left) for k in of_holder} for key, of_holder in self._holders}
        with contextlib.ExitStack() as scopes:
            for variable in self._sharded:
                inner = getattr(variable, "_value", variable)  # of a variable of Keras 3
                scopes.enter_context(attributes(inner, {"_sok_held": next(left)}))
            yield of_holders, replacements

    def rows(self, parts: Parts, names: Iterable[str]) -> list[Rows]:
        """What this rank writes of these variables, under the name that a SavedModel has."""
        return [self._rows(parts, name) for name in names]

    def _rows(self, parts, name):
        spread, key = self._spreads[name], key_of(name)
        row_bytes = spread.dtype.size * int(np.prod(spread.shape[1:]))

        def slices(start, stop):
            begin = spread.begin[0] + start, *spread.begin[1:]
            yield Slice(key, spread.shape, begin, spread.read(start, stop))

        own_rows = Rows(spread.num_rows, row_bytes, slices)
        if spread.dtype in _SLICED and all(spread.shape):
            return own_rows
        is_writer = comm.current().rank == 0
        whole = np.empty(spread.shape if is_writer else [0], spread.dtype.as_numpy_dtype)

        def take(piece):
            bounds = zip(piece.begin, piece.value.shape, strict=True)
            whole[tuple(slice(at, at + size) for at, size in bounds)] = piece.value

        parts.gather([own_rows], take)
        return Rows(int(is_writer), 0, lambda *_: [Slice(key, spread.shape, (), whole)])
