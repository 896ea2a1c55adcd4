"""Finds the Keras layers being called, under either Keras: one must list a table that is looked up.

A table that no layer lists would be looked up and never trained, so such a lookup raises. Both
Kerases record the call in progress per thread; neither has a public name for the record.
"""

from __future__ import annotations

import sys
import weakref
from typing import Any

from sok_like.runtime.framework import hooks, running_keras
from sok_like.runtime.framework.running_keras import is_keras_3
from sok_like.runtime.ranks import comm
from sok_like.table.variable import is_embedding_variable, unwrap

_NOT_LISTED = (
    "Table '{name}' is looked up in layer '{layer}', which does not list it among its "
    "variables: `fit` would never train it. A layer holds a table by `self.table = variable`; a "
    "Lambda layer cannot hold one. "
    "sok.GroupEmbedding and the other layers of this package hold their tables themselves. For a "
    "table that is not trained, set `trainable=False`."
)
_COMPILED = (
    "Table '{name}' is looked up in a step that XLA compiles, which it cannot: pass "
    "jit_compile=False to the model's `compile`, or call the model once before. With a GPU Keras "
    "chooses XLA for a model whose tables are not made yet."
)


def training_of_call() -> Any:
    """`training` of the Keras call in progress; None outside of one, or if the call has none."""
    if is_keras_3():
        call = _keras_3_call()
        return None if call is None else call.get_value("training")
    return _tf_keras_call().training


def check_listed(variable: Any, keys: Any) -> None:
    """Raises unless a layer of the Keras call in progress lists a trainable table.

    Raises also within a step that XLA is to compile.

    The table is an EmbeddingVariable, or a tf.Variable with a `table_name`.

    If keys are symbolic tensors of tf_keras, each op becomes a layer of its own, which lists
    nothing.
    """
    if running_keras.compiled:
        raise RuntimeError(_COMPILED.format(name=variable.table_name))
    if not variable.trainable:
        return
    outermost = "an op of a functional model" if _is_symbolic(keys) else None
    for layer in _layers_of_call():
        if _lists(layer, variable):
            return
        outermost = layer.name
    if outermost is not None:
        raise RuntimeError(_NOT_LISTED.format(name=variable.table_name, layer=outermost))


def _layers_of_call():
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


def _is_symbolic(keys):
    if is_keras_3():  # Keras 3 refuses them in TensorFlow's ops
        return False
    from tf_keras.src.engine import keras_tensor

    return isinstance(keys, keras_tensor.KerasTensor)


def _lists(layer, variable):
    # Kept on the variable: a variable of TensorFlow cannot be an element of a set.
    listed_by = variable.__dict__.setdefault("_listed_by", weakref.WeakSet())
    if layer not in listed_by:
        if not any(_inside(weight) is variable for weight in layer.variables):
            return False
        listed_by.add(layer)
    return True


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


@hooks.behind(hooks.MODELS)
def _install():
    if is_keras_3():
        why = "XLA cannot compile the ops of tables that a model holds, nor averages over ranks"
        hooks.wrap("keras.src.trainers.trainer", "model_supports_jit", _supports_jit, why)
    else:
        why = "finds the layers around the one that looks a table up"
        hooks.wrap(type(_tf_keras_call()), "enter", _entering, why)
