"""Raises where a functional Keras model would cast floats to the integers of a hash table.

    Input(dtype="int64") -> ... -> layer with a table         given 0.7, NaN or 2.0**53 + 1

Keras casts what it is given to the dtype of its `Input`, silently. pandas makes floats of integers
with gaps, so such an id would become another one before a layer sees it.
"""

from __future__ import annotations

import weakref
from typing import Any

import tensorflow as tf

from sok_like.runtime.framework import hooks
from sok_like.runtime.framework.running_keras import is_keras_3
from sok_like.table.keys import may_be_keys
from sok_like.table.variable import is_embedding_variable

# By model: the layer with a table that an input leads to, by the `id` of the input.
_leads_to: weakref.WeakKeyDictionary[Any, dict[int, str]] = weakref.WeakKeyDictionary()


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


def _keys_of(model):
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
    return _leads_to[model]


def _check(model, value, reference):
    dtype = getattr(value, "dtype", None)
    if dtype is None or not tf.as_dtype(dtype).is_floating or may_be_keys(tf.as_dtype(dtype)):
        return
    layer = _keys_of(model).get(id(reference))
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
    why = "floats for the keys of a table raise"
    if is_keras_3():
        from keras.src.models.functional import Functional

        hooks.wrap(Functional, "_convert_inputs_to_tensors", _convert, why)
        hooks.wrap(tf.keras.Sequential, "__call__", _call_sequential, why)
    else:
        from tf_keras.src.engine.functional import Functional

        hooks.wrap(Functional, "_conform_to_reference_input", _conform, why)
