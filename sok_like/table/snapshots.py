"""A shard at one instant as values: for dumps, checkpoints, copies, `sok.export`, Keras' weights.

A checkpoint says which rank's part of a table it holds. The slot names end with the line `sok_like:
rank 0 of 1, step 17, decay 0.9`, or with the name of the dump beside the checkpoint.

Keras gets and sets weights as arrays, by position. Rows without their keys would be useless, so the
value of a table is a `TableWeights`: it holds both and refuses to become an array.
"""

import dataclasses
import re
from typing import Any

import numpy as np
import tensorflow as tf

from sok_like.runtime.checks import unmet
from sok_like.runtime.native import libraries
from sok_like.runtime.ranks import comm
from sok_like.table.as_variable import as_embedding_variable
from sok_like.table.content import FIELDS, REQUIRED, TableContent, nothing
from sok_like.table.keys import as_keys, as_rows, held_here, in_key_dtype, owner
from sok_like.table.keys import owned as owned_places

_NO_ARRAY = (
    "The weights of table '{name}' are keys and rows, not one array: use their attributes `keys` "
    "and `rows`. `sok.Saver().dump_to_file(variable, folder)` and tf.train.Checkpoint keep a "
    "table. Received: {what}"
)

_PLACE = re.compile(r"sok_like: rank (\d+) of (\d+), step (-?\d+), decay (\S+)")
BESIDE = "sok_like: beside the checkpoint, "  # then the name of the folder


class Snapshots:
    """Methods of an EmbeddingVariable that read and write its whole shard."""

    handle: Any
    keeps_records: bool

    def snapshot(self, with_slots: bool = True, evict: bool = False) -> TableContent:
        """Keys, rows, slot rows and records of one instant; `evict` omits what dumps omit."""
        fields = libraries.ops().sok_table_export(
            handle=self.handle, with_slots=with_slots, evict=evict
        )
        names = FIELDS if self.keeps_records else REQUIRED
        return TableContent(**{name: getattr(fields, name) for name in names})

    def register_for_read(self, with_slots: bool = True, evict: bool = False) -> Any:
        """The number by which `table_reader` reads the content in parts, or stages another."""
        return libraries.ops().sok_table_hand_over(
            handle=self.handle, with_slots=with_slots, evict=evict
        )

    def mark(self) -> Any:
        """An op without effect that a tf.function treats as a change of the table."""
        return libraries.ops().sok_table_keep_changes(handle=self.handle, keep=False)

    def load_snapshot(self, content: TableContent, replace: bool = True) -> Any:
        """The inverse of `snapshot`; `replace` removes all other keys first.

        Without records (a table without policies) the keys count as never seen. NaN in a slot row
        stands for the optimizer's initial value. After a failure nothing has changed.
        """
        vars(self).pop("_training", None)  # slot rows may be of any optimizer, see optimizers.owner
        inputs = _inputs(content)
        return libraries.ops().sok_table_import(handle=self.handle, replace=replace, **inputs)

    def stage(self, staged_id: Any = 0, content: TableContent | None = None) -> tuple[Any, Any]:
        """The first half of `load_snapshot`, which may fail: the table is unchanged.

        `staged_id` is the result of `table_reader.stage_parts`, in place of the content; 0: none.
        Returns the argument of `commit_staged`, and a string scalar: why it failed, or empty.
        """
        inputs = _inputs(content or nothing())
        return libraries.ops().sok_table_read_aside(handle=self.handle, made=staged_id, **inputs)

    def commit_staged(self, staged: Any) -> Any:
        """The second half, which cannot fail; `staged` must not be used again."""
        vars(self).pop("_training", None)  # as in `load_snapshot`
        return libraries.ops().sok_table_take_aside(handle=self.handle, aside=staged)


def _inputs(content):
    """The content as inputs of an op."""
    records = np.zeros([0, 3], np.int64) if content.records is None else content.records
    return {**{name: getattr(content, name) for name in FIELDS}, "records": records}


def checkpointed(snapshot: TableContent) -> dict[str, Any]:
    """The tensors of a table inside a checkpoint, which say which rank's they are."""
    communicator = comm.current()
    tensors = snapshot.fields()
    place = f"sok_like: rank {communicator.rank} of {communicator.world_size}, step "
    step, scale = tensors.pop("optimizer_step"), tensors.pop("initial_row_scale")
    decay = tf.strings.as_string(scale, scientific=True, precision=17)
    line = tf.strings.join([place, tf.strings.as_string(step), ", decay ", decay])
    tensors["slot_names"] = tf.concat([tensors["slot_names"], [line]], axis=0)
    return tensors


def referring(variable: Any, reference: str) -> dict[str, Any]:
    """The same tensors without content, for a checkpoint whose tables lie beside it."""
    tensors = nothing(variable.dim, variable.keeps_records).fields()
    del tensors["optimizer_step"], tensors["initial_row_scale"]  # as in `checkpointed`
    tensors["slot_names"] = np.array([(BESIDE + reference).encode()], dtype=object)
    with tf.device("/CPU:0"):
        return {name: tf.constant(value) for name, value in tensors.items()}


def reference_in(tensors: dict[str, Any]) -> str | None:
    """The reference of a table beside its checkpoint; None: its content is inside. Eager only."""
    names = np.asarray(tensors["slot_names"], dtype=object)
    line = bytes(names[-1]).decode() if len(names) else ""
    return line.removeprefix(BESIDE) if line.startswith(BESIDE) else None


def from_checkpoint(tensors: dict[str, Any], table: str) -> TableContent:
    """The inverse of `checkpointed`."""
    # Any number of ranks can read what one wrote. The part of several must be this rank's.
    communicator = comm.current()
    own = communicator.rank, communicator.world_size

    def split(names):
        line = names[-1].decode() if len(names) else ""
        if line.startswith(BESIDE):
            raise ValueError(
                "A checkpoint that several ranks wrote must be restored eagerly. "
                f"Received: a restore in a graph (table '{table}')"
            )
        place = _PLACE.fullmatch(line)
        if place is None:
            required = "say which rank's part it is: save again with this version of sok_like"
            raise unmet(f"A checkpoint of table '{table}'", required, f"an end {line!r:.80}")
        *numbers, scale = place.groups()
        rank, world_size, step = map(int, numbers)
        if (rank, world_size) != own and world_size > 1:
            raise ValueError(
                f"What rank {rank} of {world_size} has copied of table '{table}' must be restored "
                f"by the same rank. Received: a restore on rank {own[0]} of {own[1]}"
            )
        return names[:-1], np.int64(step), np.float64(scale), np.int64(world_size)

    names, step, scale, written_by = tf.numpy_function(
        split, [tensors["slot_names"]], [tf.string, tf.int64, tf.float64, tf.int64]
    )
    names.set_shape([None])
    step.set_shape([])
    scale.set_shape([])
    fields = {**tensors, "slot_names": names, "optimizer_step": step, "initial_row_scale": scale}
    return owned(TableContent(**fields), written_by > 1)


def owned(content: TableContent, is_part: Any = False) -> TableContent:
    """What this rank owns of a table that one rank wrote; all of it if `is_part` is true."""
    communicator = comm.current()
    if communicator.world_size == 1:
        return content

    def is_here(keys):
        is_owned = tf.equal(owner(keys, communicator.world_size), communicator.rank)
        return tf.logical_or(is_part, is_owned)

    here = is_here(tf.convert_to_tensor(content.keys))
    by_key = {name: tf.boolean_mask(values, here) for name, values in content.by_key().items()}
    waiting = tf.convert_to_tensor(content.waiting)
    waiting = tf.boolean_mask(waiting, is_here(waiting[:, 0]))
    return dataclasses.replace(content, waiting=waiting, **by_key)


class _AnyRows(tf.TensorShape):
    """`[None, embedding_dim]`; equal to shapes with any number of rows."""

    def __eq__(self, other):
        try:
            return self.is_compatible_with(other)
        except (TypeError, ValueError):
            return NotImplemented

    __ne__, __hash__ = object.__ne__, tf.TensorShape.__hash__


class _Carrier(np.ndarray):
    """An array that remembers the TableWeights it was made of; views of it do, too."""

    table_weights: Any = None


@dataclasses.dataclass(frozen=True, eq=False)
class TableWeights:
    """Keys and rows of one rank's shard, at one instant."""

    name: str
    keys: np.ndarray  # `[num_keys]`, in the table's key dtype, ascending as unsigned numbers
    rows: np.ndarray  # float32 `[num_keys, embedding_dim]`

    @property
    def shape(self) -> tf.TensorShape:
        """`[None, embedding_dim]`: any number of rows fits a table."""
        return _AnyRows([None, self.rows.shape[1]])

    @property
    def dtype(self) -> Any:
        """Raises; tf_keras asks for it to write an array into a file."""
        raise AttributeError(_NO_ARRAY.format(name=self.name, what="a write to an .h5 file"))

    def __repr__(self):
        return f"TableWeights('{self.name}', {len(self.keys)} keys, dim={self.rows.shape[1]})"

    def __array__(self, dtype=None, copy=None):
        # tf_keras' `set_weights` asks for an array of the variable's dtype and assigns that.
        if dtype != np.float32:
            raise TypeError(_NO_ARRAY.format(name=self.name, what="a conversion to an array"))
        carrier = np.array(self.rows).view(_Carrier).copy()
        carrier.table_weights = self
        return carrier


def set_weights(variable: Any, weights: TableWeights) -> None:
    """Makes this rank's shard hold these keys and no others. Eager only."""
    keys, name = weights.keys, variable.table_name
    keys = keys.view(np.int64) if keys.dtype == np.uint64 else keys.astype(np.int64)
    required = ""
    if weights.rows.shape != (len(keys), variable.dim):
        required = f"rows of {variable.dim} floats"
    elif len(owned_places(keys)) != len(keys):
        required = (
            f"those of rank {comm.current().rank}: each rank sets the weights that it got, on the "
            "same number of ranks"
        )
    if required:
        raise ValueError(f"The weights of table '{name}' must be {required}. Received: {weights!r}")
    replace_rows(variable, keys, weights.rows)


def replace_rows(variable: Any, keys: np.ndarray, rows: Any, chunk: int = 2**24) -> None:
    """Makes this rank's shard hold its own of the int64 keys, and no others."""
    # Slot rows of keys that stay are kept. Rows may be memory-mapped, and are read by chunks.
    mine = owned_places(keys)
    present = variable.snapshot(with_slots=False).keys.numpy()
    gone = np.setdiff1d(present, keys[mine])
    if len(gone):  # a table without an index always has all its keys
        variable.erase(gone)
    step = max(1, chunk // variable.dim)
    for start in range(0, len(mine), step):
        at = mine[start : start + step]
        part = np.asarray(rows[at], np.float32)
        libraries.ops().sok_table_assign(handle=variable.handle, keys=keys[at], rows=part)


def export(variable: Any) -> tuple[tf.Tensor, tf.Tensor]:
    """All keys and rows of this rank's shard, at one instant, on the CPU.

    Args:
        variable: EmbeddingVariable.

    Returns:
        Keys `[size]` in the variable's key dtype, ascending as unsigned numbers, and rows
        float32 `[size, embedding_dim]`.

    Raises:
        TypeError: `variable` is not an EmbeddingVariable.
        tf.errors.InvalidArgumentError: a key does not fit the key dtype.
    """
    variable = as_embedding_variable(variable)
    snapshot = variable.snapshot(with_slots=False)
    return in_key_dtype(snapshot.keys, variable), snapshot.rows


def assign(variable: Any, keys: Any, rows: Any) -> Any:
    """Writes rows by key and inserts missing keys; if keys repeat, the last row wins.

    Every rank may pass any keys: each writes those that it owns and ignores the rest, so all ranks
    may pass the same full list. Slot rows of existing keys are unchanged.

    Args:
        variable: EmbeddingVariable.
        keys: `[num_keys]`, integers.
        rows: float32 `[num_keys, embedding_dim]`.

    Returns:
        None when eager; the op in a graph.

    Raises:
        TypeError: `variable` is not an EmbeddingVariable, keys are not integers, or rows are not
            real numbers.
        tf.errors.InvalidArgumentError: the shapes do not fit.
        tf.errors.ResourceExhaustedError: the table cannot hold all new keys, and does not evict by
            score; none was written.
    """
    variable = as_embedding_variable(variable)
    keys = tf.reshape(as_keys(keys), [-1])
    rows = as_rows(rows, "rows", variable.table_name)
    if comm.current().world_size > 1:
        mine = held_here(variable, keys)
        keys, rows = tf.boolean_mask(keys, mine), tf.boolean_mask(rows, mine)
    return libraries.ops().sok_table_assign(handle=variable.handle, keys=keys, rows=rows)
