"""Refuses to write or read files of `tf.compat.v1` graphs with tables.

A graph's file holds the op that makes a table, but not the table's options, files and rows. A
SavedModel of a session would serve no rows, and an imported graph could not restore its tables.
"""

from __future__ import annotations

import functools
from typing import Any

import tensorflow as tf
from tensorflow.python.ops import resource_variable_ops

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


def refuse() -> None:
    """Wraps the functions that write and read such graphs; once, when the ops are loaded."""
    builder: Any = tf.compat.v1.saved_model.Builder
    for name in ("add_meta_graph_and_variables", "add_meta_graph"):
        setattr(builder, name, _writing(getattr(builder, name), name))
    variable: Any = resource_variable_ops.ResourceVariable
    variable.from_proto = staticmethod(_reading(variable.from_proto))


def _writing(own, what):
    @functools.wraps(own)
    def add(self, *args, **kwargs):
        # Not the session's graph: both functions write the default one.
        operations = tf.compat.v1.get_default_graph().get_operations()
        names = [op.name.rpartition("/")[0] for op in operations if op.type == _TABLE]
        if names:
            raise NotImplementedError(_EXPORTED.format(what=what, names=names))
        return own(self, *args, **kwargs)

    return add


def _reading(own):
    @functools.wraps(own)
    def from_proto(variable_def, import_scope=None):
        if not tf.executing_eagerly():
            graph, name = tf.compat.v1.get_default_graph(), variable_def.variable_name
            name = f"{import_scope}/{name}" if import_scope else name
            if graph.as_graph_element(name).op.type == _TABLE:
                name = name.rpartition("/")[0]
                raise NotImplementedError(_IMPORTED.format(name=name))
        return own(variable_def, import_scope)

    return from_proto
