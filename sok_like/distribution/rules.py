"""How each layer class computes on shards of its variables.

A layer runs its own `call`, which reads whole variables, if it has no rule, or its rule does not
support how its variables are sharded. The rule is chosen at each call, so a layer and its variables
may be made in any order. Products and convolutions are in `products.py`.

In an embedding lookup, ranks exchange rows, never the table. All ranks of a line along a model axis
have the same ids, so each knows which rows are needed from which owner, and one collective is
enough:

    ('model', None)   unique ids, by owner -> own rows of them -> gathered -> rows of the ids
    (None, 'model')   own columns of the rows of the unique ids -> gathered

In the backward pass each rank takes the gradients of its own rows or columns out of the whole
gradient, without a collective. The gradient of Keras' Embedding has one value per occurrence of an
id, as in one process, because Keras 3's optimizers square them one by one.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import tensorflow as tf

from sok_like.dist_model_parallel.embedding import Embedding
from sok_like.distribution.collectives import (
    gather,
    samples_are_split,
    split_batch,
    with_length,
)
from sok_like.distribution.products import (
    CutProduct,
    einsum,
    einsum_product,
    only_cut,
    rides_along,
    run_product,
)
from sok_like.distribution.sharded_variable import held_whole, local_rows, shard_of
from sok_like.embeddings.all2all_dense_embedding import All2AllDenseEmbedding
from sok_like.embeddings.distributed_embedding import DistributedEmbedding
from sok_like.lookup import exporting
from sok_like.lookup.dense_lookup import as_row_numbers, lookup_rows, require_in_range
from sok_like.lookup.flat_ids import flat_values, with_flat_values
from sok_like.lookup.local_variables import unique_in_graph
from sok_like.runtime import turns


class Rule(NamedTuple):
    """A layer's call on shards."""

    run: Callable  # takes the arguments of the layer's `call`
    collectives: str  # the collectives of a training step, for `summary`
    variable: Any = None  # the sharded variable to which these collectives belong
    rides_along: Any = None  # a sharded bias that needs no collective of its own, or None


def rule_of(layer: Any) -> Rule | None:
    """The rule for a built layer with its present variables; None if it reads whole variables."""
    find = _RULES.get(type(layer))
    changed = getattr(layer, "lora_enabled", False) or getattr(layer, "quantization_mode", None)
    return None if find is None or changed or not layer.built else find(layer)


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

    replaced = {
        "_sok_distribution": distribution,
        "call": tf.autograph.experimental.do_not_convert(loop if loops else call),
        "supports_jit": False,  # XLA cannot compile Horovod's collectives
    }
    for name, value in replaced.items():  # bypasses Keras' tracking of attributes
        object.__setattr__(layer, name, value)


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
    if only_cut(table) is None:
        return None

    def run(inputs):
        ids = tf.convert_to_tensor(inputs)
        ids = ids if ids.dtype in (tf.int32, tf.int64) else tf.cast(ids, tf.int32)
        # Keras counts negative ids from the end.
        ids = tf.where(ids < 0, ids + layer.input_dim, ids)
        rows = _rows_by_occurrence(table, tf.reshape(ids, [-1]), layer.name)
        rows = tf.reshape(rows, tf.concat([tf.shape(ids), [layer.output_dim]], 0))
        return tf.cast(tf.ensure_shape(rows, [*ids.shape, layer.output_dim]), layer.compute_dtype)

    return Rule(run, _LOOKUP, table)


def _sok_embedding(layer):
    table = layer.embeddings
    if only_cut(table) is None:
        return None

    def run(inputs, weights=None):
        ids = inputs if tf.is_tensor(inputs) else tf.convert_to_tensor(inputs)
        rows, inverse = _unique_rows(table, flat_values(ids), layer.name)
        # The unique rows form a table with new row numbers. A graph may lose their static width.
        rows = tf.ensure_shape(rows, [None, layer.output_dim])
        ids = with_flat_values(ids, inverse)
        combined = lookup_rows(rows, ids, layer.combiner, weights, layer.name)
        return tf.cast(combined, layer.compute_dtype)

    return Rule(run, _LOOKUP, table)


def _unique_of(table, ids, table_name):
    """How a table is cut, over which ranks, under which name; the ids, the unique ones, the
    positions of the ids among these.
    """
    shard: Any = shard_of(table)
    cut = shard.placement.cuts[0]
    ids = require_in_range(as_row_numbers(ids), shard.placement.global_shape[0], table_name)
    return cut, shard.mesh.along(cut.axis), shard.placement.path, ids, *tf.unique(ids)


def _unique_rows(table, ids, table_name):
    """The rows of the unique ids, whole on every rank, and the position of each id's row."""
    cut, line, path, ids, unique, inverse = _unique_of(table, ids, table_name)
    if cut.dim == 1:
        columns = local_rows(table, unique)
        whole = gather(columns, 1, line, f"{path}_columns")
        return with_length(whole, 1, cut.length), inverse

    name = unique_in_graph(f"{path}_rows")
    mine, position = _in_order_of_owners(unique, cut)

    def of_rows(rows):
        return tf.gather(turns.collective_in_turn(line, "all_gather", rows, name), position)

    start, _ = cut.bounds()
    exchange = _with_gradient(of_rows, lambda grad: tf.gather(grad, mine))
    return exchange(local_rows(table, tf.gather(unique, mine) - start)), inverse


def _rows_by_occurrence(table, ids, table_name):
    """A row for each id, `[num_keys, output_dim]`; so is the gradient."""
    cut, line, path, ids, unique, inverse = _unique_of(table, ids, table_name)
    places = tf.range(tf.size(ids))
    first = tf.math.unsorted_segment_min(places, inverse, tf.size(unique))

    if cut.dim == 1:

        def of_columns(columns):
            columns = tf.gather(columns, first)
            whole = gather(columns, 1, line, f"{path}_columns")
            return tf.gather(with_length(whole, 1, cut.length), inverse)

        start, stop = cut.bounds()
        return _with_gradient(of_columns, lambda grad: grad[:, start:stop])(local_rows(table, ids))

    name = unique_in_graph(f"{path}_rows")
    mine, position = _in_order_of_owners(unique, cut)
    is_mine = _owner(ids, cut) == cut.index
    own = tf.boolean_mask(places, is_mine)
    place_among_own = tf.cumsum(tf.cast(is_mine, tf.int32)) - 1

    def of_rows(rows):
        rows = tf.gather(rows, tf.gather(place_among_own, tf.gather(first, mine)))
        gathered = turns.collective_in_turn(line, "all_gather", rows, name)
        return tf.gather(tf.gather(gathered, position), inverse)

    start, _ = cut.bounds()
    exchange = _with_gradient(of_rows, lambda grad: tf.gather(grad, own))
    return exchange(local_rows(table, tf.gather(ids, own) - start))


def _with_gradient(function, back):
    return tf.custom_gradient(lambda rows: (function(rows), back))


def _in_order_of_owners(unique, cut):
    """Which of the unique ids this rank owns, and where the row of each unique id arrives."""
    owner = _owner(unique, cut)
    by_owner = tf.argsort(owner, stable=True)  # the order in which the ranks' rows arrive
    mine = tf.boolean_mask(by_owner, tf.gather(owner, by_owner) == cut.index)
    return mine, tf.math.invert_permutation(by_owner)


def _owner(ids, cut):
    """The shard that holds each id: shards before row `edge` have one row more."""
    ids = tf.cast(ids, tf.int64)
    size, longer = divmod(cut.length, cut.num_shards)
    edge = longer * (size + 1)
    return tf.where(ids < edge, ids // (size + 1), longer + (ids - edge) // max(size, 1))


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
