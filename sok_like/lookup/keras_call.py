"""What Keras does around a lookup, under either Keras.

* A table that is looked up must be listed by a layer of the call in progress: otherwise it would
  never be trained, so such a lookup raises. Both Kerases record the call per thread; neither has a
  public name for the record.
* The `training` flag of the call: a bool, a number, None, or a tensor in graphs of tf_keras.
* A functional model casts what it is given to the dtype of its `Input`, silently. pandas makes
  floats of integers with gaps, so an id would become another one before a layer sees it. Floats for
  an `Input` of integers that leads to a layer with a table raise: 0.7, NaN, 2.0**53 + 1.
"""

import sys
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import tensorflow as tf

from sok_like.runtime.framework import hooks, running_keras
from sok_like.runtime.framework.running_keras import is_keras_3
from sok_like.runtime.ranks import comm
from sok_like.table.keys import may_be_keys
from sok_like.table.variable import is_embedding_variable, unwrap

_evaluating = hooks.Within()
# By model: the layer with a table that an input leads to, by the `id` of the input.
_leads_to: weakref.WeakKeyDictionary[Any, dict[int, str]] = weakref.WeakKeyDictionary()


def training_of_call() -> Any:
    """`training` of the Keras call in progress; None outside of one, or if the call has none."""
    if is_keras_3():
        call = _keras_3_call()
        return None if call is None else call.get_value("training")
    return _tf_keras_call().training


def by_training(training: Any, function: Callable[[bool], Any]) -> Any:
    """`function(training)` with a Python bool; both branches if it is a tensor, as in tf_keras."""
    # None is True, but False in a step of `evaluate` or `predict`: Keras 3 passes no flag to a
    # model whose `call` has no argument for it. So it must be the default of a layer's `call`.
    # Keras 3 hands any other default on to the layers that are called next, such as a Dropout.
    if training is None:
        training = not _evaluating
    if tf.is_tensor(training):
        static = tf.get_static_value(training)
        if static is None:
            return tf.cond(
                tf.cast(training, tf.bool), lambda: function(True), lambda: function(False)
            )
        training = static
    return function(bool(training))


def check_listed(variable: Any, keys: Any) -> None:
    """Raises unless a layer of the Keras call lists a trainable table; also in a step for XLA."""
    # Each op on symbolic tensors of tf_keras becomes a layer of its own, which lists nothing.
    if running_keras.compiled:
        raise RuntimeError(
            f"Table '{variable.table_name}' is looked up in a step that XLA compiles, which it "
            "cannot: pass jit_compile=False to the model's `compile`, or call the model once "
            "before. With a GPU Keras chooses XLA for a model whose tables are not made yet."
        )
    if not variable.trainable:
        return
    outermost = None
    if not is_keras_3():  # which refuses symbolic keys in TensorFlow's ops
        from tf_keras.src.engine import keras_tensor

        if isinstance(keys, keras_tensor.KerasTensor):
            outermost = "an op of a functional model"
    # Kept on the variable: a variable of TensorFlow cannot be an element of a set.
    listed_by = variable.__dict__.setdefault("_listed_by", weakref.WeakSet())
    for layer in layers_of_call():
        if layer not in listed_by and any(_inside(w) is variable for w in layer.variables):
            listed_by.add(layer)
        if layer in listed_by:
            return
        outermost = layer.name
    if outermost is not None:
        raise RuntimeError(
            f"Table '{variable.table_name}' is looked up in layer '{outermost}', which does not "
            "list it among its variables: `fit` would never train it. A layer holds a table by "
            "`self.table = variable`; a Lambda layer cannot hold one. sok.GroupEmbedding and the "
            "other layers of this package hold their tables themselves. For a table that is not "
            "trained, set `trainable=False`."
        )


def layers_of_call() -> Iterator[Any]:
    """The layers of the call in progress, from the innermost to the outermost."""
    if is_keras_3():
        call = _keras_3_call()
        if call is not None:
            yield call.entry_layer
        return
    call = _tf_keras_call()
    state = call._state if call.in_call else None
    while state is not None:
        if state["layer"] is not None:
            yield state["layer"]
        state = state.get(_OUTER)


# tf_keras records the innermost layer only. So each record gets the one around it.
_OUTER = "sok_outer"


def _entering(own, self, layer, *args, **kwargs):
    entered = own(self, layer, *args, **kwargs)
    entered._state[_OUTER] = self._state if self.in_call else None
    return entered


def _inside(weight):
    """The table of a weight: a hash table, or rows of a dense one."""
    return unwrap(weight) if is_embedding_variable(weight) else getattr(weight, "_value", weight)


def _keras_3_call():
    keras = sys.modules.get("keras")
    if keras is None:
        return None
    from keras.src.backend.common import global_state

    return global_state.get_global_attribute("current_call_ctx")


def _tf_keras_call():
    from tf_keras.src.engine import base_layer_utils

    return base_layer_utils.call_context()


def _supports_jit(own, model):
    if comm.current_or_single().world_size > 1 or not own(model):
        return False
    return not any(hasattr(_inside(v), "table_name") for v in model.variables)


def nodes_of(model: Any) -> list[Any]:
    """Calls of layers in a functional model, each after those that it depends on; no inputs."""
    by_depth = getattr(model, "_nodes_by_depth", None) or {}
    depths = sorted(by_depth, reverse=True)
    return [node for depth in depths for node in by_depth[depth] if not node.is_input]


def layer_of(node: Any) -> Any:
    """The layer that is called."""
    return node.operation if is_keras_3() else node.layer


def inputs_of(node: Any) -> list[Any]:
    """The symbolic tensors that it is called on."""
    return tf.nest.flatten(node.input_tensors if is_keras_3() else node.keras_inputs)


def _check(model, value, reference):
    dtype = getattr(value, "dtype", None)
    if dtype is None or not tf.as_dtype(dtype).is_floating or may_be_keys(tf.as_dtype(dtype)):
        return
    if model not in _leads_to:
        layers: dict[int, str] = {}
        for node in reversed(nodes_of(model)):
            layer = layer_of(node)
            outputs = [id(tensor) for tensor in tf.nest.flatten(node.outputs)]
            name = next((layers[key] for key in outputs if key in layers), None)
            if any(is_embedding_variable(weight) for weight in getattr(layer, "variables", ())):
                name = layer.name
            if name is not None:
                integers = [t for t in inputs_of(node) if tf.as_dtype(t.dtype).is_integer]
                layers.update(dict.fromkeys(map(id, integers), name))
        _leads_to[model] = layers
    layer = _leads_to[model].get(id(reference))
    if layer is not None:
        raise TypeError(
            f"Input '{reference.name}' must be integers: they are keys of layer '{layer}', and a "
            "cast from floats would silently change large ones, fractions and NaN. pandas makes "
            "floats of a column of integers with gaps: read it with dtype 'Int64', then fill the "
            f"gaps with an id of their own, `.fillna(-1).astype('int64')`. Received: {dtype}"
        )


def _convert(own, self, flat_inputs):
    for value, reference in zip(flat_inputs, self._inputs, strict=False):
        _check(self, value, reference)
    return own(self, flat_inputs)


def _call_sequential(own, self, *args, **kwargs):
    # Keras 3 casts an input of a Sequential model before its functional one sees it.
    functional = getattr(self, "_functional", None)
    if functional is not None and args:
        _check(functional, args[0], functional._inputs[0])
    return own(self, *args, **kwargs)


def _conform(own, self, tensor, ref_input):
    _check(self, tensor, ref_input)
    return own(self, tensor, ref_input)


@hooks.behind(hooks.MODELS)
def _install():
    why = "lookups of evaluate and predict insert nothing"
    running_keras.note_steps("test", _evaluating, why)
    running_keras.note_steps("predict", _evaluating, why)
    why = "floats for the keys of a table raise"
    if is_keras_3():
        from keras.src.models.functional import Functional

        hooks.wrap(Functional, "_convert_inputs_to_tensors", _convert, why)
        hooks.wrap(tf.keras.Sequential, "__call__", _call_sequential, why)
        why = "XLA cannot compile the ops of tables that a model holds, nor averages over ranks"
        hooks.wrap("keras.src.trainers.trainer", "model_supports_jit", _supports_jit, why)
    else:
        from tf_keras.src.engine.functional import Functional

        hooks.wrap(Functional, "_conform_to_reference_input", _conform, why)
        why = "finds the layers around the one that looks a table up"
        hooks.wrap(type(_tf_keras_call()), "enter", _entering, why)
