"""`tf.train.Checkpoint` on any number of ranks: all make the same call with the same path.

On one rank the content of a table is inside the checkpoint. On several, rank 0 writes the
checkpoint and every rank writes its part of the tables beside it (`transaction.py`). Both kinds can
be read at any number of ranks. Dense tables of dist_model_parallel are stored by slice
(`dense_pieces.py`). Other variables of single ranks (`de_local`, such as sok2's) go to one file per
rank, and need the same number of ranks.

TensorFlow has no hook where ranks could agree, so `install` wraps the one class through which
`Checkpoint`, `CheckpointManager` and tf_keras' `save_weights` write and read. Checkpoints without
tables and shards are unchanged.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import os
from typing import Any

import numpy as np
import tensorflow as tf
from tensorflow.python.checkpoint import checkpoint as checkpoint_lib
from tensorflow.python.checkpoint import checkpoint_management, functional_saver, util
from tensorflow.python.trackable import trackable_utils
from tensorflow.python.training.saving.saveable_object import SaveSpec
from tensorflow.python.training.saving.saveable_object_util import (
    SaveableCompatibilityConverter as Converter,
)
from tensorflow.python.training.saving.saveable_object_util import TrackableSaveable

from sok_like.runtime import comm
from sok_like.runtime.agreement import agreed
from sok_like.runtime.attributes import attributes
from sok_like.saving import dense_pieces, transaction
from sok_like.saving.dense_reading import Reading
from sok_like.saving.pieces import together
from sok_like.table import snapshots
from sok_like.table.variable import is_embedding_variable, unwrap

_CALL = "a save of tf.train.Checkpoint"
_READ = "a restore of tf.train.Checkpoint"
_OWN = "sok_like/ranks"  # name of the tensor that says where variables of single ranks are


@functools.cache
def install() -> None:
    """Teaches TensorFlow's object-based checkpoints to store tables; once per process."""
    saver = functional_saver.MultiDeviceSaver
    saver.save = _wrapped(saver.save, _save)
    saver.restore = _wrapped(saver.restore, _restore)
    whole: Any = checkpoint_lib.TrackableSaver
    whole.save, whole.restore = _saving(whole.save), _restoring(whole.restore)
    management: Any = checkpoint_management
    own = management._delete_file_if_exists

    @functools.wraps(own)
    def delete(filespec):
        own(filespec)
        if str(filespec).endswith(".index"):
            transaction.remove(str(filespec).removesuffix(".index"))

    management._delete_file_if_exists = delete


def _wrapped(own, ours):
    @functools.wraps(own)
    def method(self, file_prefix, options=None):
        return ours(own, self, file_prefix, options)

    return method


def _saving(own):
    @functools.wraps(own)
    def save(self, *args, **kwargs):
        if not tf.executing_eagerly():
            return own(self, *args, **kwargs)
        objects = util.list_objects(self._graph_view)
        _check_reached(objects)
        with dense_pieces.of_root(objects):
            return own(self, *args, **kwargs)

    return save


def _restoring(own):
    @functools.wraps(own)
    def restore(self, save_path, *args, **kwargs):
        if save_path is None or not tf.executing_eagerly():
            return own(self, save_path, *args, **kwargs)
        objects = util.list_objects(self._graph_view)
        holders = transaction.Kinds(objects).holders
        if not holders:
            return own(self, save_path, *args, **kwargs)
        agreed(
            lambda: dense_pieces.build_optimizers(objects, os.fspath(save_path)),
            comm.current(),
            _READ,
            ValueError,
        )
        with dense_pieces.of_root(util.list_objects(self._graph_view)):
            return own(self, save_path, *args, **kwargs)

    return restore


def _check_reached(objects):
    """Raises ValueError if TensorFlow does not find a table of a model in it."""
    known = {id(unwrap(each)) for each in objects if is_embedding_variable(each)}
    for model in objects:
        variables = _variables_of(model) if isinstance(model, tf.keras.layers.Layer) else ()
        tables = transaction.Kinds(variables).tables
        lost = [table.table_name for table in tables if id(table) not in known]
        lost += dense_pieces.unreached(objects, variables)
        if lost:
            raise ValueError(
                "tf.train.Checkpoint finds layers of a Keras model that are attributes of it, not "
                "those in a list or dictionary. Make them attributes, or use save_weights. "
                f"Received: model '{model.name}', whose tables of {lost} would be missing"
            )


def _variables_of(model):
    try:
        return model.variables
    except ValueError:  # tf_keras' models have none before they are built
        return ()


def _kinds(saver):
    """A saver's objects that are not the same on all ranks."""
    tensors = [t for shards in saver._shardable_tensors_by_task.values() for t in shards]
    known: dict[int, Any] = {id(_object_of(t)): _object_of(t) for t in tensors}
    return transaction.Kinds(each for each in known.values() if each is not None)


def _object_of(tensor):
    """The object of a tensor, without the adapters that a restore puts around it."""
    found = tensor.trackable
    while isinstance(found, (Converter, TrackableSaveable)):
        found = found.obj if isinstance(found, Converter) else found._trackable
    return found


def _save(write, saver, file_prefix, options):
    kinds = _kinds(saver)
    if not kinds or not comm.is_initialized():
        return write(saver, file_prefix, options)
    if comm.current().world_size == 1:
        for key, value in dense_pieces.tensors_of(kinds.holders) if kinds.holders else ():
            _add_tensor(saver, key, value)
        return write(saver, file_prefix, options)
    path = _path_of(file_prefix, kinds)
    communicator = comm.current()
    mine = {
        "ranks": transaction.new_reference("ranks"),
        "dense": transaction.new_reference("dense"),
        "ids": [holder.id for holder in kinds.holders],
    }
    kept: list[str] = []

    def common(_):
        if communicator.rank == 0:
            for key, text in notes.items():
                _add_tensor(saver, key, text)
            write(saver, file_prefix, options)

    notes: dict[str, str] = {}
    if kinds.own or kinds.holders:
        told = agreed(lambda: mine, communicator, _CALL)[0]
        kept = [told["ranks"], told["dense"]]
        agreed(lambda: _write_parts(saver, kinds, path, told), communicator, _CALL)
        ranks = communicator.world_size
        if kinds.own:
            notes[_OWN] = json.dumps({"world_size": ranks, "folder": told["ranks"]})
        if kinds.holders:
            notes[dense_pieces.KEY] = dense_pieces.note(told["dense"], ranks, kinds.holders)
    references = [snapshots.pending_reference(table) for table in kinds.tables]
    transaction.save(_CALL, path, kinds.tables, common, references=references, kept=kept)
    return None


def _write_parts(saver, kinds, path, told):
    """Writes what only this rank has."""
    if kinds.own:
        _write_own(saver, kinds.own, path, told["ranks"])
    if kinds.holders:
        folder = transaction.folder_of(path, told["dense"])
        place = comm.current().rank, comm.current().world_size
        dense_pieces.write(folder, *place, told["ids"], kinds.holders)


def _restore(read, saver, file_prefix, options):
    kinds = _kinds(saver)
    if not kinds or not tf.executing_eagerly() or not comm.is_initialized():
        return read(saver, file_prefix, options)
    communicator, path = comm.current(), _path_of(file_prefix, kinds)
    restored: list[Any] = []

    def read_tables():
        with transaction.reading(path), _part_of(saver, [*kinds.tables, *kinds.holders]):
            read(saver, file_prefix, options)

    def run():
        with _part_of(saver, [*kinds.tables, *kinds.holders], others=True):
            return read(saver, file_prefix, options)

    if communicator.world_size > 1:
        # The index has the checksum of every tensor.
        transaction.agree_on_file(f"{path}.index", communicator, _READ)
        if kinds.own:
            agreed(lambda: _check_own(path, communicator), communicator, _READ)
            run = _with_own(run, saver, kinds.own, path, communicator)
    dense: list[Any] = []
    with together():
        # Tables first: an error there must leave ordinary variables unchanged.
        if kinds.tables or kinds.holders:
            agreed(read_tables, communicator, _READ)
        if kinds.holders:
            agreed(lambda: dense.extend(_dense_reads(kinds.holders, path)), communicator, _READ)
        agreed(lambda: restored.append(run()), communicator, _READ)
    if kinds.holders:
        agreed(lambda: [copy() for copy in dense] and None, communicator, _READ)
    return restored[0]


def _dense_reads(holders, path):
    """Functions, one per holder in the file, that copy this rank's parts."""
    found = dense_pieces.parts_to_read(holders)
    if not found:
        return
    folder = (dense_pieces.note_of(path) or {}).get("folder")
    reading = Reading.of_checkpoint(path, folder and transaction.folder_of(path, folder))
    for holder, parts in found:
        holder.read_as, name = None, holder.read_as
        reading.check_tables(holder, name, [part for part in parts if "." not in part.key])
        reading.check_slots(holder, name, [part for part in parts if "." in part.key])
        yield functools.partial(reading.restore, name, parts)


def _part_of(saver, objects, others=False):
    """A scope in which a saver restores only `objects`; `others`: all but them."""
    chosen = {id(each) for each in objects}
    parts = {
        task: [each for each in shards if (id(unwrap(_object_of(each))) in chosen) != others]
        for task, shards in saver._shardable_tensors_by_task.items()
    }
    registered = saver._registered_savers if others else {}
    tensors = {task: part for task, part in parts.items() if part}
    names = {"_shardable_tensors_by_task": tensors, "_registered_savers": registered}
    return attributes(saver, names)


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


def _add_tensor(saver, key, text):
    """Adds a tensor that belongs to no object to those that are written."""
    shards = next(iter(saver._shardable_tensors_by_task.values()))
    tensor = tf.constant(text)
    spec = SaveSpec(tensor, "", key, dtype=tf.string, device=tensor.device)
    shards[:] = [shard for shard in shards if shard.checkpoint_key != key]
    shards.append(
        dataclasses.replace(
            shards[0],
            _tensor_save_spec=spec,
            tensor=tensor,
            dtype=tf.string,
            name=key,
            slice_spec="",
            checkpoint_key=key,
            trackable=None,
        )
    )


# ---- variables of one rank ----


def _tensors_of(saver, objects):
    wanted = {id(each) for each in objects}
    for shards in saver._shardable_tensors_by_task.values():
        yield from (tensor for tensor in shards if id(_object_of(tensor)) in wanted)


def _file_of(path, reference, communicator):
    folder = transaction.folder_of(path, reference)
    return dense_pieces.file_of(folder, communicator.rank, communicator.world_size)


def _write_own(saver, objects, path, reference):
    arrays = {}
    for tensor in _tensors_of(saver, objects):
        value = tensor.tensor if tensor.tensor is not None else tensor._tensor_save_spec.tensor
        arrays[tensor.checkpoint_key] = np.asarray(value)
    with dense_pieces.flushed(_file_of(path, reference, comm.current())) as opened:
        np.savez(opened, **arrays)


def _note_of(path):
    reader = tf.train.load_checkpoint(path)
    return json.loads(reader.get_tensor(_OWN)) if reader.has_tensor(_OWN) else None


def _check_own(path, communicator):
    note = _note_of(path)
    if note is None or note["world_size"] != communicator.world_size:
        ranks = "one rank" if note is None else f"{note['world_size']} ranks"
        raise ValueError(
            "A checkpoint with variables that differ between ranks must be restored on the number "
            "of ranks that wrote it; sok2.dump and sok2.load also work with another number. "
            f"Received: {path!r} of {ranks}, on {communicator.world_size} ranks"
        )
    transaction.check_seen(str(_file_of(path, note["folder"], communicator)))


def _with_own(run, saver, objects, path, communicator):
    """A `run` that reads this rank's variables from its file."""
    if communicator.rank == 0:
        return run

    def run_and_read():
        names: dict[int, dict[str, str]] = {}
        for tensor in _tensors_of(saver, objects):
            local = trackable_utils.extract_local_name(tensor.checkpoint_key)
            names.setdefault(id(_object_of(tensor)), {})[local] = tensor.checkpoint_key
        found = []
        with np.load(_file_of(path, _note_of(path)["folder"], communicator)) as arrays:
            for each in objects:
                keys = names[id(each)].items()
                found.append({local: tf.constant(arrays[key]) for local, key in keys})
        with _part_of(saver, objects, others=True):
            restored = run()
        for each, tensors in zip(objects, found, strict=True):
            each._restore_from_tensors(tensors)
        return restored

    return run_and_read
