"""The package's ops and functions in TensorFlow's graphs, where nobody looks at a value.

* AutoGraph takes the functions of this package as they are, as it takes TensorFlow's and Keras'.
  None of them branches on a tensor by `if` or `while`. Conversion would rewrite each of them, and
  all that they call, when a user's `tf.function` is traced. The first trace of a lookup and update
  of eight tables takes 2.0 to 2.5 s with it, 0.3 to 0.4 s without.
* Conditions on tensors are checked when an op runs (`checked`).
* Gradients of a table's gradients do not exist; a program that asks for one gets an error. For a
  function that is called under two tapes, TensorFlow builds the gradient of the gradient
  beforehand, though the program may never ask for it. Then it passes zeros in, and gets zeros back
  instead of an error (`refuse_second_order`).
* `tf.compat.v1` graphs with tables are not written to files or read from them. A graph's file holds
  the op that makes a table, but not the table's options, files and rows. A SavedModel of a session
  would serve no rows, and an imported graph could not restore its tables.
"""

from collections.abc import Sequence
from typing import Any

import tensorflow as tf
from tensorflow.python.autograph.core import config
from tensorflow.python.eager.polymorphic_function import concrete_function
from tensorflow.python.ops import resource_variable_ops

from sok_like.runtime.framework import hooks

_NO_SECOND_ORDER = (
    "The gradient of a table cannot be differentiated again. A penalty on gradients can be taken "
    "with respect to the rows that a lookup returns: `inner_tape.watch(rows)`, then "
    "`inner_tape.gradient(loss, rows)`. Received: a gradient of `tape.gradient(loss, table)`"
)
_TABLE = "SokTableHandle"

_beforehand = hooks.Within()


def checked(tensor: Any, condition: Any, text: str, *received: Any) -> Any:
    """`tensor`; where it runs, InvalidArgumentError with `text`, `received` unless `condition`."""
    if tf.executing_eagerly():
        if not condition:
            text = " ".join(f"{part}" for part in (text, *received))
            raise tf.errors.InvalidArgumentError(None, None, text)
        return tensor
    # In a graph each of `tf.debugging`'s checks is a `tf.cond`, which is slow to trace.
    with tf.control_dependencies([tf.raw_ops.Assert(condition=condition, data=[text, *received])]):
        return tf.identity(tensor)


def counter(owner: Any, name: str) -> tf.Variable:
    """An int64 counter of an object, from 0 on: one variable per graph for sessions."""
    # Not by setattr, at which Keras would make it part of what is saved.
    counters = vars(owner).setdefault("_sok_counters", {})
    with tf.init_scope(), tf.device("CPU:0"):
        graph = None if tf.executing_eagerly() else tf.compat.v1.get_default_graph()
        if (graph, name) not in counters:
            # Not tf.Variable: a function that makes one as it is traced is traced twice.
            options = {"dtype": tf.int64, "trainable": False, "name": name}
            counters[graph, name] = resource_variable_ops.ResourceVariable(0, **options)
    return counters[graph, name]


def refuse_second_order(
    grads: Sequence[tf.Tensor | None], inputs: Sequence[tf.Tensor]
) -> list[tf.Tensor]:
    """Zeros in the shapes of `inputs`, for a gradient that TensorFlow builds beforehand."""
    if not _beforehand:
        raise NotImplementedError(_NO_SECOND_ORDER)
    floats = [g for g in grads if g is not None and g.dtype.is_floating]
    none = tf.reduce_all([tf.reduce_all(tf.equal(gradient, 0.0)) for gradient in floats])
    with tf.control_dependencies([tf.raw_ops.Assert(condition=none, data=[_NO_SECOND_ORDER])]):
        return [tf.zeros_like(value) for value in inputs]


def _writing(own, self, *args, **kwargs):
    # Not the session's graph: both functions write the default one.
    operations = tf.compat.v1.get_default_graph().get_operations()
    names = [op.name.rpartition("/")[0] for op in operations if op.type == _TABLE]
    if names:
        raise NotImplementedError(
            "A SavedModel that is written from a session (simple_save, saved_model.Builder) would "
            "hold no rows of embedding tables. In an eager program make the tables, "
            "`sok.Saver().restore_from_file(table, folder)` with the table's folder in '<path of "
            "the Saver>.tables', and write the model by `sok.export_saved_model(model, path)`. "
            f"Received: {own.__name__}, a graph with the tables {names}"
        )
    return own(self, *args, **kwargs)


def _reading(own, variable_def, import_scope=None):
    if not tf.executing_eagerly():
        graph, name = tf.compat.v1.get_default_graph(), variable_def.variable_name
        name = f"{import_scope}/{name}" if import_scope else name
        if graph.as_graph_element(name).op.type == _TABLE:
            raise NotImplementedError(
                "A graph with embedding tables cannot be read from a file (import_meta_graph, "
                "saved_model.load in a session): the file does not hold the options of the "
                "tables. Make the graph by the code that made it, then "
                "`tf.compat.v1.train.Saver().restore(session, path)`. Received: the table "
                f"'{name.rpartition('/')[0]}'"
            )
    return own(variable_def, import_scope)


@hooks.at_init
def _install():
    rules = (config.DoNotConvert(__name__.partition(".")[0]), *config.CONVERSION_RULES)
    hooks.put(config, "CONVERSION_RULES", rules, "AutoGraph takes this package as it is")
    why = "TensorFlow builds gradients of gradients beforehand in it, for nobody yet"
    owner, name = concrete_function._TapeGradientFunctions, "_build_functions_for_outputs"
    hooks.wrap(owner, name, _beforehand, why)
    why = "a graph that is read from a file lacks the options of tables"
    hooks.wrap(resource_variable_ops.ResourceVariable, "from_proto", _reading, why)


@hooks.behind(hooks.SESSIONS)
def _install_writing():
    for name in ("add_meta_graph_and_variables", "add_meta_graph"):
        why = "a SavedModel of a session would hold no rows"
        hooks.wrap(tf.compat.v1.saved_model.Builder, name, _writing, why)
