"""All that saving changes in TensorFlow and Keras, put in by `sok.Init` and by the first use.

TensorFlow and Keras have no hooks by which ranks could agree on a save. Without tables and shards
the wrapped functions work as before.
"""

import importlib
from typing import Any

import tensorflow as tf
from tensorflow.python.checkpoint import checkpoint, checkpoint_management, functional_saver

from sok_like.runtime.framework import hooks
from sok_like.runtime.framework.hooks import at_init, behind, put, wrap
from sok_like.runtime.framework.running_keras import is_keras_3
from sok_like.saving.containers import checkpoints, keras_files, keras_layers, v1_saver
from sok_like.saving.containers import tables_in_checkpoints as in_checkpoints
from sok_like.saving.parts import dense_tables
from sok_like.table.variable import EmbeddingVariable

_KERAS = "keras.src" if is_keras_3() else "tf_keras.src"
_LIBRARY = f"{_KERAS}.saving.saving_lib"


@at_init
def _install():
    EmbeddingVariable.element_in_graph = staticmethod(lambda v: v1_saver.in_graph(v).element)
    saver = checkpoint.TrackableSaver
    wrap(saver, "save", checkpoints.save_objects, "finds the slot variables of tables")
    wrap(saver, "restore", checkpoints.restore_objects, "builds optimizers of dense tables")
    wrap(_LIBRARY, "load_model", keras_files.load_model, "ranks read one file")
    why = "reads dense tables with their slot variables"
    wrap(_LIBRARY, "_load_state", keras_layers.load_state, why)
    layer: Any = tf.keras.layers.Layer
    wrap(layer, "save_own_variables", keras_layers.save, "a layer's tables are no arrays")
    wrap(layer, "load_own_variables", keras_layers.load, "the same, on the way back")
    if is_keras_3():
        tracker = _of(f"{_KERAS}.utils.tracking", "Tracker")
        wrap(tracker, "track", keras_layers.track, "a layer's tables are among its weights")


@behind(hooks.CHECKPOINTS)
def _install_checkpoints():
    devices = functional_saver.MultiDeviceSaver
    wrap(devices, "save", checkpoints.save, "puts tables into checkpoints, or beside them")
    wrap(devices, "restore", checkpoints.restore, "reads all of a checkpoint, then assigns it")
    layer: Any = tf.keras.layers.Layer
    why = "a layer's tables have names in checkpoints"
    wrap(layer, "_trackable_children", in_checkpoints.children, why)
    wrap(layer, "_lookup_dependency", in_checkpoints.look_up, why)
    wrap(layer, "_handle_deferred_dependencies", in_checkpoints.deferred, why)


@behind(hooks.CHECKPOINTS, hooks.SESSIONS)
def _install_removal():
    delete, why = "_delete_file_if_exists", "removes tables with their checkpoint"
    wrap(checkpoint_management, delete, checkpoints.delete, why)


@behind(hooks.SESSIONS, hooks.RANKS)
def _install_savers():
    # Without tables, too, ranks must not overwrite each other's rows.
    saver, hook = tf.compat.v1.train.Saver, tf.compat.v1.train.CheckpointSaverHook
    wrap(saver, "save", v1_saver.save, "writes tables beside the file")
    wrap(saver, "restore", v1_saver.restore, "reads tables from beside the file")
    wrap(hook, "begin", v1_saver.begin, "ranks save at the same step")
    wrap(hook, "after_run", v1_saver.after_run, "ranks save at the same step")


@behind(hooks.MODELS)
def _install_models():
    why = "ranks write one file, and tables beside it"
    wrap(_LIBRARY, "save_model", keras_files.save, why)
    wrap(_LIBRARY, "save_weights_only", keras_files.save, "the same of weights")
    why = "ranks load all of it, or nothing"
    wrap(_LIBRARY, "load_weights_only", keras_files.load_weights, why)
    why = "older files hold no tables"
    if is_keras_3():
        older = f"{_KERAS}.legacy.saving.legacy_h5_format"
        wrap(older, "save_model_to_hdf5", keras_files.write_older, why)
        wrap(older, "load_weights_from_hdf5_group", keras_files.read_older, why)
        wrap(older, "load_weights_from_hdf5_group_by_name", keras_files.read_older, why)
    else:
        for name in ("save_model", "save_weights", "load_weights"):
            wrap(f"{_KERAS}.saving.legacy.save", name, keras_files.write_older, why)


@behind(hooks.RANKS)
def _install_keras_on_ranks():
    why = "asks no user on several ranks"
    asking = f"{_KERAS}.utils.io_utils"
    wrap(asking, "ask_to_proceed_with_overwrite", keras_files.ask, why)
    if is_keras_3():
        # Keras checks whether a folder exists and then makes it; another rank may be faster.
        why = "makes a folder that another rank may make"
        put(f"{_KERAS}.utils.file_utils", "makedirs", tf.io.gfile.makedirs, why)
        backup = _of(f"{_KERAS}.callbacks.backup_and_restore", "BackupAndRestore")
        removal = "on_train_end"
    else:
        backup = _of(f"{_KERAS}.distribute.worker_training_state", "WorkerTrainingState")
        removal = "delete_backup"
    wrap(backup, removal, keras_files.remove_backup, "one rank removes the backup, at the end")


@behind(hooks.DENSE_TABLES)
def _install_dense_tables():
    walk = "_walk_saveable" if is_keras_3() else "_walk_trackable"
    why = "leaves out what a layer over tables writes itself"
    wrap(_LIBRARY, walk, keras_files.walk, why)
    if is_keras_3():
        optimizer = _of("keras.src.backend.tensorflow.optimizer", "TFOptimizer")
    else:
        optimizer = _of(f"{_KERAS}.optimizers.optimizer", "_BaseOptimizer")
    why = "leaves out slot variables that are stored with dense tables"
    wrap(optimizer, "_trackable_children", dense_tables.children, why)
    for name in ("save_own_variables", "load_own_variables"):
        wrap(optimizer, name, dense_tables.save_or_load_optimizer, why)


def _of(module, name):
    return getattr(importlib.import_module(module), name)
