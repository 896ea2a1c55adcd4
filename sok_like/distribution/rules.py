"""How each layer class computes on shards of its variables.

A layer runs its own `call`, which reads whole variables, if it has no rule, or its rule does not
support how its variables are sharded. The rule is chosen at each call, so a layer and its variables
may be made in any order.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import tensorflow as tf

from sok_like.dist_model_parallel.embedding import Embedding
from sok_like.distribution import lookup_rule
from sok_like.distribution.collectives import gather, samples_are_split, split_batch
from sok_like.distribution.products import (
    CutProduct,
    einsum,
    einsum_product,
    only_cut,
    rides_along,
    run_product,
)
from sok_like.distribution.sharded_variable import held_whole
from sok_like.embeddings.all2all_dense_embedding import All2AllDenseEmbedding
from sok_like.embeddings.distributed_embedding import DistributedEmbedding
from sok_like.lookup import exporting
from sok_like.lookup.dense_lookup import lookup_rows
from sok_like.lookup.flat_ids import flat_values, with_flat_values


class Rule(NamedTuple):
    """A layer's call on shards."""

    run: Callable  # takes the arguments of the layer's `call`
    collectives: str  # the collectives of a training step, for `summary`
    variable: Any = None  # the sharded variable to which these collectives belong
    rides_along: Any = None  # a sharded bias that needs no collective of its own, or None


def rule_of(layer: Any) -> Rule | None:
    """The rule for a built layer with its present variables; None if it reads whole variables."""
    find = _RULES.get(type(layer))
    plain = not getattr(layer, "lora_enabled", False) and not getattr(
        layer, "quantization_mode", None
    )
    return find(layer) if find is not None and plain and layer.built else None


def install(layer: Any, distribution: Any) -> None:
    """Makes a layer's `call` follow its rule."""
    loops = isinstance(layer, tf.keras.layers.RNN)
    if "call" in vars(layer) or not (loops or type(layer) in _RULES):
        return
    own_call = layer.call

    @functools.wraps(own_call)
    def loop(*args, **kwargs):
        with held_whole(layer.variables if layer.built else ()):
            return own_call(*args, **kwargs)

    @functools.wraps(own_call)
    def call(inputs, *args, **kwargs):
        rule = rule_of(layer)
        unfit = isinstance(inputs, tf.SparseTensor) and not isinstance(layer, Embedding)
        if rule is None or unfit or exporting.current():
            return own_call(inputs, *args, **kwargs)
        return rule.run(inputs, *args, **kwargs)

    # Bypasses Keras' __setattr__, which tracks attributes.
    object.__setattr__(layer, "_sok_distribution", distribution)
    object.__setattr__(
        layer, "call", tf.autograph.experimental.do_not_convert(loop if loops else call)
    )
    object.__setattr__(layer, "supports_jit", False)  # XLA cannot compile Horovod's collectives


def sums_repeated_ids(layer: Any) -> bool:
    """Whether a layer's sparse gradients have each row once even in one process."""
    return isinstance(layer, Embedding)


def _kernel(layer):
    """The kernel variable itself, not Keras 3's property."""
    return vars(layer).get("_kernel", getattr(layer, "kernel", None))


def _einsum(layer, equation):
    kernel = _kernel(layer)
    product = einsum_product(equation, kernel)
    if product is None:
        return None

    def run(inputs, training=None):
        inputs = tf.cast(tf.convert_to_tensor(inputs), layer.compute_dtype)
        outputs = run_product(product, inputs, layer.bias, einsum(equation))
        return outputs if layer.activation is None else layer.activation(outputs)

    return Rule(run, product.collectives, kernel, rides_along(product, layer.bias))


def _convolution(layer):
    kernel = _kernel(layer)
    cut = only_cut(kernel)
    # TensorFlow cannot convolve an empty shard, and tf_keras pads causal inputs in `call`.
    if cut is None or cut.length < cut.num_shards or layer.groups > 1 or layer.padding == "causal":
        return None
    of_input, of_output = len(kernel.shape) - 2, len(kernel.shape) - 1
    if cut.dim not in (of_input, of_output):
        return None
    last = layer.data_format == "channels_last"
    channels = -1 if last else 1
    dims = (channels, None) if cut.dim == of_input else (None, channels)
    product = CutProduct(kernel, *dims)

    def as_addend(bias):
        return bias if last else tf.reshape(bias, [-1] + [1] * layer.rank)

    def run(inputs):
        outputs = run_product(product, inputs, layer.bias, layer.convolution_op, as_addend)
        return outputs if layer.activation is None else layer.activation(outputs)

    return Rule(run, product.collectives, kernel, rides_along(product, layer.bias))


def _keras_embedding(layer):
    table = vars(layer).get("_embeddings", getattr(layer, "embeddings", None))
    if not lookup_rule.has_rule(table):
        return None

    def run(inputs):
        ids = tf.convert_to_tensor(inputs)
        ids = ids if ids.dtype in (tf.int32, tf.int64) else tf.cast(ids, tf.int32)
        # Keras counts negative ids from the end.
        ids = tf.where(ids < 0, ids + layer.input_dim, ids)
        rows = lookup_rule.rows_by_occurrence(table, tf.reshape(ids, [-1]), layer.name)
        found = tf.reshape(rows, tf.concat([tf.shape(ids), [layer.output_dim]], 0))
        return tf.cast(tf.ensure_shape(found, [*ids.shape, layer.output_dim]), layer.compute_dtype)

    return Rule(run, _LOOKUP, table)


def _sok_embedding(layer):
    table = layer.embeddings
    if not lookup_rule.has_rule(table):
        return None

    def run(inputs, weights=None):
        ids = inputs if tf.is_tensor(inputs) else tf.convert_to_tensor(inputs)
        rows, inverse = lookup_rule.unique_rows(table, flat_values(ids), layer.name)
        # The unique rows form a table with new row numbers. A graph may lose their static width.
        rows = tf.ensure_shape(rows, [None, layer.output_dim])
        found = lookup_rows(
            rows, with_flat_values(ids, inverse), layer.combiner, weights, layer.name
        )
        return tf.cast(found, layer.compute_dtype)

    return Rule(run, _LOOKUP, table)


def _batch_normalization(layer):
    """Statistics must be those of whole batches, so every rank normalizes all samples."""
    current = layer._sok_distribution
    line = current.mesh.along(current.batch_dim_name)
    if line.world_size == 1:
        return None
    own_call = type(layer).call

    def run(inputs, training=None, mask=None):
        if not training or mask is not None or not samples_are_split():
            return own_call(layer, inputs, training=training, mask=mask)
        # A rank's samples affect the outputs, and so the gradients, of all samples.
        whole = gather(inputs, 0, line, f"{layer.name}_samples", gradient="sum")
        outputs = own_call(layer, whole, training=training)
        return split_batch(outputs, line.world_size, line.rank)

    return Rule(run, "all_gather of inputs, reduce_scatter of their gradients")


def _hash_table(layer):
    """Also splits the samples along the model axes, so that each key is looked up once."""
    current = layer._sok_distribution
    lines = [current.mesh.along(a) for a in current.mesh.shape if a != current.batch_dim_name]
    own_call = type(layer).call

    def run(inputs, training=None):
        for line in lines:
            inputs = split_batch(inputs, line.world_size, line.rank)
        # The loss is a mean over ranks along the batch axis, and each key counts once.
        before = layer.gradient_scale
        object.__setattr__(layer, "gradient_scale", "mean")
        try:
            rows = own_call(layer, inputs, training=training)
        finally:
            object.__setattr__(layer, "gradient_scale", before)
        for line in reversed(lines):
            rows = gather(rows, 0, line, f"{layer.name}_rows", gradient=line.world_size)
        return rows

    return Rule(run, "3 all_to_all of keys and rows over all ranks, all_gather of rows")


_LOOKUP = "all_gather of the batch's rows"

_RULES: dict[type, Callable] = {
    tf.keras.layers.Dense: lambda layer: _einsum(layer, "...i,io->...o"),
    tf.keras.layers.EinsumDense: lambda layer: _einsum(layer, layer.equation),
    tf.keras.layers.Embedding: _keras_embedding,
    tf.keras.layers.BatchNormalization: _batch_normalization,
    Embedding: _sok_embedding,
    **dict.fromkeys(
        (tf.keras.layers.Conv1D, tf.keras.layers.Conv2D, tf.keras.layers.Conv3D), _convolution
    ),
    **dict.fromkeys((DistributedEmbedding, All2AllDenseEmbedding), _hash_table),
}
