"""What a layer does with shards of its variables, by its class.

A layer without a rule, or with its variables cut otherwise than its rule can use, runs its own
`call` and so reads whole variables. The rule is looked for at each call, so it does not matter in
which order a layer and its variables are made.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import tensorflow as tf

from sok_like.dist_model_parallel.embedding import Embedding
from sok_like.dist_model_parallel.embedding_lookup import lookup_rows
from sok_like.distribution import lookup_rule
from sok_like.distribution.einsum_rule import einsum_rule, sharded_einsum
from sok_like.distribution.sharded_variable import shard_of


class Rule(NamedTuple):
    """A layer's call on shards.

    Attributes:
        run: Takes what the layer's `call` takes.
        collectives: What a training step exchanges for it, for `summary`.
    """

    run: Callable
    collectives: str


def rule_of(layer: Any) -> Rule | None:
    """The rule for a built layer as its variables lie now; None if it reads whole variables."""
    find = _RULES.get(type(layer))
    plain = not getattr(layer, "lora_enabled", False) and not getattr(
        layer, "quantization_mode", None
    )
    return find(layer) if find is not None and plain and layer.built else None


def install(layer: Any) -> None:
    """Lets a layer's `call` follow its rule, from now on."""
    if "call" in vars(layer) or type(layer) not in _RULES:
        return
    own_call = layer.call

    @functools.wraps(own_call)
    def call(inputs, *args, **kwargs):
        rule = rule_of(layer)
        if rule is None or (isinstance(inputs, tf.SparseTensor) and not _takes_sparse(layer)):
            return own_call(inputs, *args, **kwargs)
        return rule.run(inputs, *args, **kwargs)

    # Past Keras' __setattr__, which tracks what a layer holds.
    object.__setattr__(layer, "call", tf.autograph.experimental.do_not_convert(call))
    object.__setattr__(layer, "supports_jit", False)  # XLA knows no collective of Horovod


def _takes_sparse(layer):
    return isinstance(layer, Embedding)


def _kernel(layer):
    """The variable itself: Keras 3 has a property in front of it."""
    return vars(layer).get("_kernel", getattr(layer, "kernel", None))


def _dense(layer):
    return _einsum(layer, "...i,io->...o")


def _einsum_dense(layer):
    return _einsum(layer, layer.equation)


def _einsum(layer, equation):
    kernel = _kernel(layer)
    shard = shard_of(kernel)
    rule = None if shard is None else einsum_rule(equation, kernel, shard.batch_axis)
    if rule is None:
        return None

    def run(inputs, training=None):
        inputs = tf.cast(tf.convert_to_tensor(inputs), layer.compute_dtype)
        outputs = sharded_einsum(rule, inputs, layer, kernel, layer.bias)
        return outputs if layer.activation is None else layer.activation(outputs)

    return Rule(run, rule.collectives)


def _keras_embedding(layer):
    table = vars(layer).get("_embeddings", getattr(layer, "embeddings", None))
    if not lookup_rule.has_rule(table):
        return None

    def run(inputs):
        ids = tf.convert_to_tensor(inputs)
        ids = ids if ids.dtype in (tf.int32, tf.int64) else tf.cast(ids, tf.int32)
        ids = tf.where(ids < 0, ids + layer.input_dim, ids)  # Keras counts those from the end
        rows, inverse = lookup_rule.distinct_rows(table, tf.reshape(ids, [-1]), layer.name)
        found = tf.gather(rows, tf.reshape(inverse, tf.shape(ids)))
        return tf.cast(tf.ensure_shape(found, [*ids.shape, layer.output_dim]), layer.compute_dtype)

    return Rule(run, _LOOKUP)


def _sok_embedding(layer):
    table = layer.embeddings
    if not lookup_rule.has_rule(table):
        return None

    def run(inputs, weights=None):
        ids = inputs if tf.is_tensor(inputs) else tf.convert_to_tensor(inputs)
        rows, inverse = lookup_rule.distinct_rows(table, _flat(ids), layer.name)
        # The distinct rows are a table, in which the ids have other numbers.
        found = lookup_rows(rows, _with_flat(ids, inverse), layer.combiner, weights, layer.name)
        return tf.cast(found, layer.compute_dtype)

    return Rule(run, _LOOKUP)


_LOOKUP = "all_gather of the batch's rows"


def _flat(ids):
    if isinstance(ids, tf.SparseTensor):
        return ids.values
    return ids.flat_values if isinstance(ids, tf.RaggedTensor) else tf.reshape(ids, [-1])


def _with_flat(ids, flat):
    if isinstance(ids, tf.SparseTensor):
        return tf.SparseTensor(ids.indices, flat, ids.dense_shape)
    if isinstance(ids, tf.RaggedTensor):
        return ids.with_flat_values(flat)
    return tf.ensure_shape(tf.reshape(flat, tf.shape(ids)), ids.shape)


_RULES: dict[type, Callable] = {
    tf.keras.layers.Dense: _dense,
    tf.keras.layers.EinsumDense: _einsum_dense,
    tf.keras.layers.Embedding: _keras_embedding,
    Embedding: _sok_embedding,
}
