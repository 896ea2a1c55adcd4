"""A shard at one instant, as tensors: for dumps, checkpoints and copies.

A checkpoint says which rank's part of a table it holds. The slot names end with the line `sok_like:
rank 0 of 1, step 17, decay 0.9`, or with the name of the dump beside the checkpoint.
"""

import dataclasses
import re
from typing import Any

import numpy as np
import tensorflow as tf

from sok_like.runtime.checks import unmet
from sok_like.runtime.native import libraries
from sok_like.runtime.ranks import comm
from sok_like.table.content import BY_KEY, FIELDS, REQUIRED, TableContent, nothing
from sok_like.table.keys import owner


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
        self._forget_optimizer()
        inputs = _inputs(content)
        return libraries.ops().sok_table_import(handle=self.handle, replace=replace, **inputs)

    def _forget_optimizer(self):
        """Loaded slot rows may be of any optimizer, see `sok_like.optimizers.owner`."""
        self.__dict__.pop("_training", None)

    def stage(self, staged_id: Any = 0, content: TableContent | None = None) -> tuple[Any, Any]:
        """The first half of `load_snapshot`, which may fail: the table is unchanged.

        `staged_id` is the result of `table_reader.stage_parts`, in place of the content; 0: none.
        Returns the argument of `commit_staged`, and a string scalar: why it failed, or empty.
        """
        inputs = _inputs(content or nothing())
        return libraries.ops().sok_table_read_aside(handle=self.handle, made=staged_id, **inputs)

    def commit_staged(self, staged: Any) -> Any:
        """The second half, which cannot fail; `staged` must not be used again."""
        self._forget_optimizer()
        return libraries.ops().sok_table_take_aside(handle=self.handle, aside=staged)


def _inputs(content):
    """The content as inputs of an op."""
    records = np.zeros([0, 3], np.int64) if content.records is None else content.records
    return {**{name: getattr(content, name) for name in FIELDS}, "records": records}


_PLACE = re.compile(r"sok_like: rank (\d+) of (\d+), step (-?\d+), decay (\S+)")
BESIDE = "sok_like: beside the checkpoint, "  # then the name of the folder


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
    by_key = {name: getattr(content, name) for name in BY_KEY}
    by_key = {name: tf.boolean_mask(a, here) for name, a in by_key.items() if a is not None}
    waiting = tf.convert_to_tensor(content.waiting)
    waiting = tf.boolean_mask(waiting, is_here(waiting[:, 0]))
    return dataclasses.replace(content, waiting=waiting, **by_key)
