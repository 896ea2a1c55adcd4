"""Refuses to write or read files of `tf.compat.v1` graphs with tables.

A graph's file holds the op that makes a table, but not the table's options, files and rows. A
SavedModel of a session would serve no rows, and an imported graph could not restore its tables.
"""

from __future__ import annotations

import tensorflow as tf
from tensorflow.python.ops import resource_variable_ops

from sok_like.runtime.framework import hooks

_TABLE = "SokTableHandle"
_EXPORTED = (
    "A SavedModel that is written from a session (simple_save, saved_model.Builder) would hold no "
    "rows of embedding tables. In an eager program make the tables, "
    "`sok.Saver().restore_from_file(table, folder)` with the table's folder in "
    "'<path of the Saver>.tables', and write the model by `sok.export_saved_model(model, path)`. "
    "Received: {what}, a graph with the tables {names}"
)
_IMPORTED = (
    "A graph with embedding tables cannot be read from a file (import_meta_graph, "
    "saved_model.load in a session): the file does not hold the options of the tables. Make the "
    "graph by the code that made it, then `tf.compat.v1.train.Saver().restore(session, path)`. "
    "Received: the table '{name}'"
)


def _writing(own, self, *args, **kwargs):
    # Not the session's graph: both functions write the default one.
    operations = tf.compat.v1.get_default_graph().get_operations()
    names = [op.name.rpartition("/")[0] for op in operations if op.type == _TABLE]
    if names:
        raise NotImplementedError(_EXPORTED.format(what=own.__name__, names=names))
    return own(self, *args, **kwargs)


def _reading(own, variable_def, import_scope=None):
    if not tf.executing_eagerly():
        graph, name = tf.compat.v1.get_default_graph(), variable_def.variable_name
        name = f"{import_scope}/{name}" if import_scope else name
        if graph.as_graph_element(name).op.type == _TABLE:
            raise NotImplementedError(_IMPORTED.format(name=name.rpartition("/")[0]))
    return own(variable_def, import_scope)


@hooks.behind(hooks.SESSIONS)
def _install_writing():
    for name in ("add_meta_graph_and_variables", "add_meta_graph"):
        why = "a SavedModel of a session would hold no rows"
        hooks.wrap(tf.compat.v1.saved_model.Builder, name, _writing, why)


@hooks.at_init
def _install_reading():
    why = "a graph that is read from a file lacks the options of tables"
    hooks.wrap(resource_variable_ops.ResourceVariable, "from_proto", _reading, why)
