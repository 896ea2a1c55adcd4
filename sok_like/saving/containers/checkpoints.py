"""`tf.train.Checkpoint` on any number of ranks: all make the same call with the same path.

On one rank the content of a table is inside the checkpoint. On several, rank 0 writes the
checkpoint and every rank writes its part of the tables beside it. Both kinds can be read at any
number of ranks. Dense tables of dist_model_parallel are stored by slice (`dense_tables.py`). Other
variables of single ranks (`de_local`, such as sok2's) need the same number of ranks.

`install.py` wraps the one class through which `Checkpoint`, `CheckpointManager` and tf_keras'
`save_weights` write and read.
"""

import contextlib
import functools
import os
import threading
from collections.abc import Callable
from typing import Any

import tensorflow as tf
from tensorflow.python.checkpoint import util
from tensorflow.python.trackable import trackable_utils

from sok_like.runtime.framework import hooks
from sok_like.runtime.framework.scoped_attributes import attributes
from sok_like.runtime.ranks import comm
from sok_like.runtime.ranks.agreement import Steps, agreed
from sok_like.saving import background, transaction
from sok_like.saving.containers import tables_in_checkpoints as in_checkpoints
from sok_like.saving.format import durable, folders
from sok_like.saving.parts import dense_tables
from sok_like.saving.parts.checkpointable import (
    CheckpointPart,
    RankLocalVariables,
    StagedContent,
    is_of_all_ranks,
)
from sok_like.saving.parts.hash_tables import HashTablePart
from sok_like.table import snapshots
from sok_like.table.content import OF_POLICIES
from sok_like.table.variable import is_embedding_variable, unwrap

_CALL = "a save of tf.train.Checkpoint"
_READ = "a restore of tf.train.Checkpoint"
# .begun: the _Begun that is begun or finished at the moment; .together: whether ranks share what is
# saved, though nothing of it may differ on them; .alone: whether one writes a SavedModel of it;
# .problems: dense tables that a restore has not found.
_now = threading.local()


def save_objects(own: Callable, self: Any, *args: Any, **kwargs: Any) -> Any:
    """`TrackableSaver.save`: finds all tables, and optimizers whose slots are saved with them."""
    hooks.open_door(hooks.CHECKPOINTS)
    if not tf.executing_eagerly():
        return own(self, *args, **kwargs)
    objects = util.list_objects(self._graph_view)
    reached = {id(unwrap(thing)) for thing in objects if is_embedding_variable(thing)}
    for model in [thing for thing in objects if isinstance(thing, tf.keras.layers.Layer)]:
        variables: Any = ()
        with contextlib.suppress(ValueError):  # tf_keras' have none before they are built
            variables = model.variables
        tables = RankLocalVariables(variables).tables
        lost = [table.table_name for table in tables if id(table) not in reached]
        lost += dense_tables.unreached(objects, variables)
        if lost:
            raise ValueError(
                "tf.train.Checkpoint finds layers and tables that are attributes of a Keras model "
                "or layer, not those in a list or dictionary. Make them attributes, or use "
                "save_weights; sok.export_saved_model writes a SavedModel. "
                f"Received: model '{model.name}', whose tables of {lost} would be missing"
            )
    together = not vars(_now).get("alone") and any(map(is_of_all_ranks, objects))
    with dense_tables.of_root(objects), attributes(_now, {"together": together}):
        return own(self, *args, **kwargs)


def by_one_rank() -> contextlib.AbstractContextManager[None]:
    """A scope in which this rank writes a SavedModel while others do not, whatever they share."""
    return attributes(_now, {"alone": True})


def restore_objects(own: Callable, self: Any, save_path: Any, *args: Any, **kwargs: Any) -> Any:
    """`TrackableSaver.restore`: builds optimizers first, so that list positions agree."""
    hooks.open_door(hooks.CHECKPOINTS)
    if save_path is None or not tf.executing_eagerly():
        return own(self, save_path, *args, **kwargs)
    objects = util.list_objects(self._graph_view)
    kinds = RankLocalVariables(objects)
    if not kinds.holders and not kinds.tables:
        return own(self, save_path, *args, **kwargs)

    def build():
        if in_checkpoints.note(os.fspath(save_path), "dense").get("slots"):
            dense_tables.build_optimizers(objects)

    if kinds.holders:
        agreed(build, comm.current(), _READ, ValueError)
    problems: list[str] = []
    with dense_tables.of_root(objects), attributes(_now, {"problems": problems}):
        status = own(self, save_path, *args, **kwargs)
    in_checkpoints.check(objects, status, os.fspath(save_path), problems)
    return status


def delete(own: Callable, filespec: Any) -> None:
    """`_delete_file_if_exists` of managers and v1 savers: removes the folders, too."""
    if comm.is_initialized() and comm.current().world_size > 1:
        # Every rank removes the file that they share. TensorFlow warns where another was first.
        for path in tf.io.gfile.glob(filespec):
            with contextlib.suppress(tf.errors.NotFoundError):
                tf.io.gfile.remove(path)
    else:
        own(filespec)
    if str(filespec).endswith(".index"):
        folders.remove_all(str(filespec).removesuffix(".index"))


def _kinds(saver):
    """A saver's objects that are not the same on all ranks."""
    objects = map(in_checkpoints.object_of, in_checkpoints.tensors_of(saver))
    return RankLocalVariables({id(thing): thing for thing in objects if thing is not None}.values())


def _path_of(file_prefix, kinds):
    if not tf.executing_eagerly():
        names = [table.table_name for table in kinds.tables]
        raise NotImplementedError(
            "On several ranks tf.train.Checkpoint saves eagerly only; in a session use "
            "tf.compat.v1.train.Saver. Received: a save or restore in a graph, with the tables "
            f"{names}"
        )
    value = file_prefix.numpy() if hasattr(file_prefix, "numpy") else file_prefix
    return os.fspath(value.decode() if isinstance(value, bytes) else value)


# ---- saving ----


def save(write: Callable, self: Any, file_prefix: Any, options: Any = None) -> Any:
    """`MultiDeviceSaver.save`: puts tables inside, or beside the checkpoint."""
    begun = vars(_now).get("begun")
    if begun is not None and begun.saver is None:  # nothing is written yet
        begun.take(self)
        return None
    saver = self if begun is None else begun.saver
    kinds = _kinds(saver)
    together = bool(kinds) or vars(_now).get("together", False)
    if not together or not comm.is_initialized():
        return write(saver, file_prefix, options)
    if begun is not None:
        saving = begun.saving
    elif comm.current().world_size > 1:
        saving = _agreed_saving(saver, kinds, HashTablePart, _path_of(file_prefix, kinds))
    else:
        in_checkpoints.put_inside(saver, kinds.holders)
        return write(saver, file_prefix, options)

    def common(references):
        if comm.current().rank == 0:
            for part, reference in zip(saving.parts, references, strict=True):
                in_checkpoints.refer(saver, kinds, part, reference)
            write(saver, file_prefix, options)

    saving.common = common
    saving.write()
    return None


def _agreed_saving(saver, kinds, of_table, path):
    """A save of tables, and of what else several ranks have, on which they agree."""
    parts: list[CheckpointPart] = [of_table(table) for table in kinds.tables]
    if comm.current().world_size > 1:
        parts += in_checkpoints.parts_besides_tables(saver, kinds, _CALL)
    saving = transaction.Saving(Steps(_CALL, own_error=True), parts, path)
    saving.agree()
    return saving


class _Begun:
    """A checkpoint whose values are those of the instant at which it was begun."""

    def __init__(self, path: str):
        self._path, self.saver = path, None
        self.saving: Any = None

    def take(self, saver: Any) -> None:
        """Takes all values but those of tables in host memory; writes dense tables of ranks."""
        if saver._registered_savers:
            raise NotImplementedError(
                "A checkpoint with objects of registered savers must be written at once. "
                f"Received: {sorted(saver._registered_savers)}, with background=True"
            )
        for tensor in in_checkpoints.tensors_of(saver):
            spec = tensor._tensor_save_spec
            spec._tensor = spec.tensor
        self.saver, kinds = saver, _kinds(saver)
        self.saving = _agreed_saving(saver, kinds, background.BackgroundPart, self._path)

        def write():
            self.saving.place()
            if comm.current().world_size == 1:
                in_checkpoints.put_inside(saver, kinds.holders)
            # Before tables, which threads write.
            for part in self.saving.parts[len(kinds.tables) :]:
                part.write()

        agreed(write, comm.current(), _CALL)


def begin(
    checkpoint: tf.train.Checkpoint, path: str, write: Callable[[], Any]
) -> background.BackgroundDump:
    """Begins a checkpoint of this instant, whose tables are written while training goes on."""
    # Other values are copied now. `finish` of the result calls `write` on all ranks.
    hooks.open_door(hooks.CHECKPOINTS)
    tables = RankLocalVariables(util.list_objects(checkpoint._saver._graph_view)).tables
    for table in tables:
        background.finish_running(table)
    begun = _Begun(path)

    def within(call):
        with contextlib.ExitStack() as scopes:
            for table in tables:
                scopes.enter_context(attributes(table, {"beside": True}))
            scopes.enter_context(attributes(_now, {"begun": begun}))
            return call()

    checkpoint.save_counter.assign_add(1)  # as the save will find it
    try:
        within(lambda: checkpoint._saver.save(path))
    finally:
        checkpoint.save_counter.assign_sub(1)
    parts = [part for part in begun.saving.parts if isinstance(part, background.BackgroundPart)]
    return background.BackgroundDump(parts, lambda: within(write))


# ---- restoring ----


def restore(read: Callable, self: Any, file_prefix: Any, options: Any = None) -> Any:
    """`MultiDeviceSaver.restore`: reads everything, then assigns it."""
    saver, kinds = self, _kinds(self)
    if not kinds or not tf.executing_eagerly() or not comm.is_initialized():
        return read(saver, file_prefix, options)
    path = _path_of(file_prefix, kinds)

    def prepare():
        ranks = comm.current().world_size
        own = in_checkpoints.values_of_rank(path, ranks) if kinds.own and ranks > 1 else {}
        for content in _prepared(path, _read(read, saver, path, options), own):
            transaction.prepare(content)
        for _, restore in saver._registered_savers.values():
            call = functools.partial(restore, file_prefix)
            transaction.prepare(StagedContent(call, may_fail=True))

    # The index has the checksum of every tensor.
    transaction.load(_READ, path, prepare, compared=f"{path}.index")
    return {}


def _read(read, saver, path, options):
    """A checkpoint's objects: each, the function that assigns, its tensors by name, their keys."""
    of_objects: list[tuple[Any, Callable[[Any], Any], dict[str, Any], list[str]]] = []
    absent, functions = _absent_policies(saver, path), saver._keys_to_restore_fn
    objects = {
        functions[tensor.checkpoint_key, tensor.slice_spec]: in_checkpoints.object_of(tensor)
        for tensor in in_checkpoints.tensors_of(saver)
    }
    present = {
        own: [key for key in keys if key[0] not in absent]
        for own, keys in saver._restore_fn_to_keys.items()
    }

    def keeping(own):
        names = [name for name, _ in present[own]]
        return lambda tensors: of_objects.append((objects[own], own, tensors, names))

    kept = {own: keeping(own) for own in present}
    instead = {
        "_shardable_tensors_by_task": {
            task: [tensor for tensor in tensors if tensor.checkpoint_key not in absent]
            for task, tensors in saver._shardable_tensors_by_task.items()
        },
        "_keys_to_restore_fn": {key: kept[own] for key, own in functions.items()},
        "_restore_fn_to_keys": {kept[own]: keys for own, keys in present.items()},
        "_registered_savers": {},
        "_num_unique_tasks": 1,  # with more, TensorFlow reads in a graph
    }
    with attributes(saver, instead):
        read(saver, path, options)
    return of_objects


def _absent_policies(saver, path):
    """The keys of records that a checkpoint lacks, as its table had no policies."""
    of_policies = [
        tensor.checkpoint_key
        for tensor in in_checkpoints.tensors_of(saver)
        if is_embedding_variable(in_checkpoints.object_of(tensor))
        and trackable_utils.extract_local_name(tensor.checkpoint_key) in OF_POLICIES
    ]
    if not of_policies:
        return set()
    reader = tf.train.load_checkpoint(path)
    return {key for key in of_policies if not reader.has_tensor(key)}


def _prepared(path, of_objects, own):
    """The new content of each object; `own` has the values that differ between ranks."""
    holders = {}
    for thing, restore, tensors, keys in of_objects:
        for name, key in zip(map(trackable_utils.extract_local_name, keys), keys, strict=True):
            if key in own:
                tensors = {**tensors, name: tf.constant(own[key])}
        if is_embedding_variable(thing):
            part, reference = HashTablePart(unwrap(thing)), snapshots.reference_in(tensors)
            if reference is not None:
                folder = transaction.folder_read(reference)
                yield part.prepare(folder)
            else:
                yield part.prepare_content(snapshots.from_checkpoint(tensors, part.name))
        elif hasattr(thing, "dense_parts"):
            holders[tensors["id"].numpy().decode()] = thing
        elif tensors.keys() == {"VARIABLE_VALUE"} and hasattr(thing, "shape"):
            shape = tensors["VARIABLE_VALUE"].shape
            if not tf.TensorShape(thing.shape).is_compatible_with(shape):
                required = f"have the shape {thing.shape} of variable '{thing.name}'"
                raise durable.wrong("A checkpoint", required, f"shape {shape}")
            yield StagedContent(functools.partial(restore, tensors))
        else:  # no variable, such as a lookup table
            yield StagedContent(functools.partial(restore, tensors), may_fail=True)
    of_holders = in_checkpoints.stored_dense_tables(path) if holders else {}
    for read_as, holder in holders.items():
        parts = dense_tables.parts_of(holder)
        stored = of_holders.get(read_as, dense_tables.NO_TABLES)
        keys, problem = dense_tables.match(holder, stored.tables(), f"Checkpoint {path!r}")
        vars(_now).get("problems", []).append(problem)
        stored = stored.renumbered(keys)
        stored.check(holder, parts)
        yield stored.prepare(parts)
