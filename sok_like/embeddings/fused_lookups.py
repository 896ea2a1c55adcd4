"""`sok.fuse_lookups`: one lookup for all hash-table layers of a functional model.

    ids_a -> layer a -> rows_a
    ids_b -> layer b -> rows_b       ==>       ids_a, ids_b -> FusedLookups -> rows_a, rows_b

Keras calls layers one after the other, and each returns its rows before the next is called. So on
several ranks a model with four layers exchanges twelve times per step. The graph of a functional
model is known beforehand, so one layer can take all their inputs, and exchange three times.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from sok_like.embeddings.distributed_embedding import EmbeddingLayer
from sok_like.lookup.keras_call import inputs_of, layer_of, nodes_of
from sok_like.lookup.table_layer import TablesLayer
from sok_like.runtime.checks import unmet
from sok_like.runtime.framework.running_keras import is_keras_3


@tf.keras.utils.register_keras_serializable("sok_like")
class FusedLookups(TablesLayer):
    """Embedding layers looked up as one group, by lists of inputs. Made by `sok.fuse_lookups`."""

    def __init__(self, layers: Sequence[Any], **kwargs: Any):
        super().__init__(**kwargs)
        for argument in ("gradient_scale", "wire_dtype"):
            values = {getattr(layer, argument) for layer in layers}
            if len(values) > 1:
                required = f"have the same `{argument}`"
                raise unmet("Layers that are looked up together", required, sorted(values, key=str))
        self.layers = list(layers)
        self.gradient_scale, self.wire_dtype = layers[0].gradient_scale, layers[0].wire_dtype
        self.supports_masking = any(layer.supports_masking for layer in self.layers)
        self.built = True

    def call(self, inputs, training=None):
        requests = [layer.request(x) for layer, x in zip(self.layers, inputs, strict=True)]
        rows_of_layers = self.look_up(training, [feature for feature, _ in requests])
        outputs = []
        for layer, (_, shape), rows in zip(self.layers, requests, rows_of_layers, strict=True):
            outputs.append(layer.as_output(rows if shape is None else tf.reshape(rows, shape)))
        return outputs

    def compute_mask(self, inputs, mask=None):
        pairs = zip(self.layers, inputs, strict=True)
        return [layer.compute_mask(x) if layer.supports_masking else None for layer, x in pairs]

    def compute_output_shape(self, input_shape):
        shapes = zip(self.layers, input_shape, strict=True)
        return [layer.compute_output_shape(shape) for layer, shape in shapes]

    def compute_output_spec(self, inputs, training=None):
        pairs = zip(self.layers, inputs, strict=True)
        return [layer.compute_output_spec(x, training) for layer, x in pairs]

    def get_config(self):
        layers = [tf.keras.layers.serialize(layer) for layer in self.layers]
        return {**super().get_config(), "layers": layers}

    @classmethod
    def from_config(cls, config):
        layers = [tf.keras.layers.deserialize(layer) for layer in config["layers"]]
        return cls(**{**config, "layers": layers})


def fuse_lookups(model: Any) -> Any:
    """The same functional model with one common exchange for its embedding layers.

    Layers are shared with `model`, and so are their tables and weights. A
    `sok.DistributedEmbedding` or `sok.All2AllDenseEmbedding` is fused if `model` itself calls it
    exactly once, and its input does not depend on another fused layer. Not fused are subclasses
    with a `call` of their own, layers with an `activity_regularizer`, and calls with
    `training=...`.

    Args:
        model: A functional Keras model.

    Returns:
        A functional model with the same inputs and outputs. Compile and save this one, not `model`:
        a file of one does not fit the other.

    Raises:
        TypeError: `model` was not made by `tf.keras.Model(inputs, outputs)`; use a
            `sok.GroupEmbedding` in a subclassed model.
        ValueError: fewer than two layers can be fused, they differ in `gradient_scale` or
            `wire_dtype`, or `model` has losses or metrics added by `add_loss` or `add_metric`.
    """
    nodes = nodes_of(model)
    if not nodes:
        raise TypeError(
            "sok.fuse_lookups needs a functional model, whose graph is known. Use a "
            "sok.GroupEmbedding in a subclassed model. "
            f"Received: {type(model).__name__} '{getattr(model, 'name', model)}'"
        )
    chosen = _chosen(nodes)
    if len(chosen) < 2:
        required = (
            "have two sok.DistributedEmbedding or sok.All2AllDenseEmbedding layers, called once, "
            "on inputs that do not depend on the other layers, so that their lookups can be fused"
        )
        raise unmet("A model", required, f"model '{model.name}' with {len(chosen)}")
    layers = [layer_of(node) for node in chosen]
    inputs = [_arguments(node, {})[0][0] for node in chosen]
    rows = FusedLookups(layers, name=f"fused_{layers[0].name}")(inputs)
    # What follows the chosen calls is called again; all else stays as it is.
    replaced = {id(tf.nest.flatten(n.outputs)[0]): r for n, r in zip(chosen, rows, strict=True)}
    for node in nodes:
        if node not in chosen and any(id(tensor) in replaced for tensor in inputs_of(node)):
            args, kwargs = _arguments(node, replaced)
            before, now = map(tf.nest.flatten, (node.outputs, layer_of(node)(*args, **kwargs)))
            replaced |= zip(map(id, before), now, strict=True)
    inputs, outputs = (
        getattr(model, f"_{what}s_struct" if is_keras_3() else f"_nested_{what}s")
        for what in ("input", "output")
    )
    outputs = tf.nest.map_structure(lambda tensor: replaced.get(id(tensor), tensor), outputs)
    fused = tf.keras.Model(inputs, outputs, name=model.name)
    _check_nothing_is_lost(model, fused, layers)
    return fused


def _check_nothing_is_lost(model, fused, layers):
    if type(model) is not type(fused):
        raise TypeError(
            "sok.fuse_lookups needs a model made by tf.keras.Model(inputs, outputs): methods of a "
            f"subclass, such as train_step, would be lost. Received: {type(model).__name__}"
        )
    layers_of_fused = {id(layer) for layer in [*fused.layers, *layers]}
    lost = [layer.name for layer in model.layers if id(layer) not in layers_of_fused]
    if lost:  # from add_loss and add_metric of tf_keras
        raise ValueError(
            "A model must not have layers that its outputs do not depend on, such as those of "
            "add_loss: the fused model would lose them. Add losses and metrics to the fused model. "
            f"Received: model '{model.name}' with {lost}"
        )


def _arguments(node, tensors):
    if is_keras_3():
        arguments = node.arguments.args, node.arguments.kwargs
    else:
        arguments = node.call_args, node.call_kwargs
    return tf.nest.map_structure(lambda x: tensors.get(id(x), x), arguments)


def _chosen(nodes):
    """The calls to fuse."""
    layers = [layer_of(node) for node in nodes]
    maker = {id(t): node for node in nodes for t in tf.nest.flatten(node.outputs)}
    above: dict[int, set[int]] = {}  # ids of all calls that a call depends on
    chosen: list[Any] = []
    for node, layer in zip(nodes, layers, strict=True):
        makers = [maker[key] for key in map(id, inputs_of(node)) if key in maker]
        above[id(node)] = {id(m) for m in makers}.union(*(above[id(m)] for m in makers))
        if not isinstance(layer, EmbeddingLayer) or type(layer).call is not EmbeddingLayer.call:
            continue
        args, kwargs = _arguments(node, {})
        only_looks_up = len(args) == 1 and all(value is None for value in kwargs.values())
        only_looks_up = only_looks_up and layer.activity_regularizer is None
        once = sum(other is layer for other in layers) == 1
        alone = not above[id(node)] & {id(other) for other in chosen}
        if once and alone and only_looks_up:
            chosen.append(node)
    return chosen
