"""A shard's keys and rows as values: `sok.export`, `sok.assign`, and Keras' weights.

Keras gets and sets weights as arrays, by position. Rows without their keys would be useless, so the
value of a table is a `TableWeights`: it holds both and refuses to become an array.
"""

import dataclasses
from typing import Any

import numpy as np
import tensorflow as tf

from sok_like.runtime.native import libraries
from sok_like.runtime.ranks import comm
from sok_like.table.as_variable import as_embedding_variable
from sok_like.table.keys import as_keys, as_rows, held_here, in_key_dtype, owned

_NO_ARRAY = (
    "The weights of table '{name}' are keys and rows, not one array: use their attributes `keys` "
    "and `rows`. `sok.Saver().dump_to_file(variable, folder)` and tf.train.Checkpoint keep a "
    "table. Received: {what}"
)


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
    elif len(owned(keys)) != len(keys):
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
    mine = owned(keys)
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
