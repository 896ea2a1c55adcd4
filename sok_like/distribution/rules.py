"""How each layer class computes on shards of its variables.

A layer runs its own `call`, which reads whole variables, if it has no rule, or its rule does not
support how its variables are sharded. The rule is chosen at each call, so a layer and its variables
may be made in any order.

In a product, each kernel dimension has a letter in the layer's equation, `...i,io->...o` for Dense.
If the sharded dimension's letter is in the output, each rank computes its part of the output from
the whole input (column-parallel), and the parts are gathered. If it is in the input, each rank
computes a term of the output from its part of the input (row-parallel), and the terms are summed.
If it is in both, the input is split and the output gathered:

    kernel (None, 'model')               kernel ('model', None)
    x [b, i] --shared--> x . k_r         x [b, i] --own shard--> x_r . k_r
    y_r [b, o/n] --gather--> y [b, o]    y_r [b, o] --summed--> y [b, o]

A convolution has two such dimensions, the channels of its input and of its output.

In an embedding lookup, ranks exchange rows, never the table. All ranks of a line along a model axis
have the same ids, so each knows which rows are needed from which owner, and one collective is
enough:

    ('model', None)   unique ids, by owner -> own rows of them -> gathered -> rows of the ids
    (None, 'model')   own columns of the rows of the unique ids -> gathered

In the backward pass each rank takes the gradients of its own rows or columns out of the whole
gradient, without a collective. The gradient of Keras' Embedding has one value per occurrence of an
id, as in one process, because Keras 3's optimizers square them one by one.
"""

import dataclasses
import functools
import itertools
import re
import string
import threading
from collections.abc import Callable
from typing import Any, NamedTuple

import tensorflow as tf

from sok_like.dist_model_parallel.embedding import Embedding
from sok_like.distribution.collectives import (
    gather,
    own_shard,
    shared,
    split_batch,
    summed,
    with_length,
)
from sok_like.distribution.mesh import shard_bounds
from sok_like.distribution.sharded_variable import held_whole, local_rows, shard_of
from sok_like.embeddings.all2all_dense_embedding import All2AllDenseEmbedding
from sok_like.embeddings.distributed_embedding import DistributedEmbedding
from sok_like.lookup import exporting
from sok_like.lookup.dense_lookup import lookup_rows, require_in_range
from sok_like.lookup.ids import FlatIds, as_row_numbers, flat_values, with_flat_values
from sok_like.lookup.local_variables import unique_in_graph
from sok_like.runtime.framework.scoped_attributes import attributes
from sok_like.runtime.ranks import exchange_order

# `inside`: within a model's call; the models inside it get batches that are already split.
# `split`: the model computes on this rank's samples of a batch.
of_call = threading.local()


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
        "supports_jit": False,  # XLA cannot compile collectives of ranks
    }
    for name, value in replaced.items():  # bypasses Keras' tracking of attributes
        object.__setattr__(layer, name, value)


def _only_cut(variable):
    """The `Cut` of a variable with exactly one, unless it is along the batch axis; else None."""
    shard = shard_of(variable)
    if shard is None or len(shard.cuts) != 1 or shard.over_batch:
        return None
    return shard.cuts[0]


def _kernel(layer):
    """The kernel variable itself, not Keras 3's property."""
    return vars(layer).get("_kernel", getattr(layer, "kernel", None))


def _product(layer, dims, compute, as_addend=tf.convert_to_tensor):
    """The rule of a layer with one sharded kernel dimension; `dims`: in inputs and in outputs."""
    # `compute` makes outputs without the bias; `as_addend` shapes a bias to be added to them.
    kernel, bias, (input_dim, output_dim) = _kernel(layer), layer.bias, dims
    shard, cut = shard_of(kernel), _only_cut(kernel)
    line, name = shard.mesh.along(cut.axis), shard.path
    # A vector that is sharded like the output needs no collective.
    can_ride = bias is not None and output_dim is not None and len(bias.shape) == 1
    rides = can_ride and _only_cut(bias) == dataclasses.replace(cut, dim=0)

    def added(outputs, bias):
        return outputs + as_addend(tf.cast(bias, outputs.dtype))

    def run(inputs):
        if input_dim is None:
            inputs = shared(inputs, line, f"{name}_input")
        else:
            inputs = own_shard(inputs, input_dim, line, f"{name}_input")
        outputs = compute(inputs, tf.cast(kernel.local, inputs.dtype))
        if output_dim is None:
            outputs = summed(outputs, line, f"{name}_output")
        else:
            outputs = added(outputs, bias.local) if rides else outputs
            outputs = gather(outputs, output_dim, line, f"{name}_output")
            outputs = with_length(outputs, output_dim, cut.length)
        outputs = outputs if bias is None or rides else added(outputs, bias)
        return outputs if layer.activation is None else layer.activation(outputs)

    forward = "all_reduce" if output_dim is None else "all_gather"
    back = "all_reduce" if input_dim is None else "all_gather"
    collectives = f"{forward} of outputs, {back} of input gradients"
    return Rule(run, collectives, kernel, bias if rides else None)


def _einsum(layer, equation):
    cut = _only_cut(_kernel(layer))
    match = re.fullmatch(r"([\w.]+),(\w+)->([\w.]+)", equation.replace(" ", ""))
    if cut is None or match is None:
        return None
    of_input, of_kernel, of_output = match.groups()

    def dim(term):
        """The cut dimension, counted from the end if an ellipsis is before it; or None."""
        term = term.replace("...", ".")
        position, dots = term.find(of_kernel[cut.dim]), term.find(".")
        if position < 0:
            return None
        return position - len(term) if 0 <= dots < position else position

    def compute(inputs, kernel):
        # With letters for `...`: TensorFlow 2.18 with oneDNN and several threads computes
        # `...i,io->...o` wrongly.
        free = (letter for letter in string.ascii_uppercase if letter not in equation)
        num_letters = inputs.shape.rank - len(of_input.replace("...", ""))
        letters = "".join(itertools.islice(free, num_letters))
        return tf.einsum(equation.replace("...", letters), inputs, kernel)

    def run(inputs, training=None):
        return rule.run(tf.cast(tf.convert_to_tensor(inputs), layer.compute_dtype))

    rule = _product(layer, (dim(of_input), dim(of_output)), compute)
    return rule._replace(run=run)


def _convolution(layer):
    kernel = _kernel(layer)
    cut = _only_cut(kernel)
    # TensorFlow cannot convolve an empty shard, and tf_keras pads causal inputs in `call`.
    if cut is None or cut.length < cut.num_shards or layer.groups > 1 or layer.padding == "causal":
        return None
    of_input, of_output = len(kernel.shape) - 2, len(kernel.shape) - 1
    if cut.dim not in (of_input, of_output):
        return None
    last = layer.data_format == "channels_last"
    channels = -1 if last else 1
    dims = (channels, None) if cut.dim == of_input else (None, channels)

    def as_addend(bias):
        return bias if last else tf.reshape(bias, [-1] + [1] * layer.rank)

    return _product(layer, dims, layer.convolution_op, as_addend)


def _keras_embedding(layer):
    table = vars(layer).get("_embeddings", getattr(layer, "embeddings", None))
    if _only_cut(table) is None:
        return None

    def run(inputs):
        ids = tf.convert_to_tensor(inputs)
        ids = ids if ids.dtype in (tf.int32, tf.int64) else tf.cast(ids, tf.int32)
        # Keras counts negative ids from the end.
        ids = tf.where(ids < 0, ids + layer.input_dim, ids)
        flat = FlatIds(ids, None, dtype=None)
        rows = _rows_by_occurrence(table, flat.ids, layer.name)
        rows = tf.ensure_shape(rows, [None, layer.output_dim])
        return tf.cast(flat.restore(rows), layer.compute_dtype)

    return Rule(run, _LOOKUP, table)


def _sok_embedding(layer):
    table = layer.embeddings
    if _only_cut(table) is None:
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
    """A table's cut, its ranks and path; the checked ids, unique ones, and positions in these."""
    shard: Any = shard_of(table)
    cut = shard.cuts[0]
    ids = require_in_range(as_row_numbers(ids), shard.global_shape[0], table_name)
    return cut, shard.mesh.along(cut.axis), shard.path, ids, *tf.unique(ids)


def _unique_rows(table, ids, table_name):
    """The rows of the unique ids, whole on every rank, and the position of each id's row."""
    cut, line, path, ids, unique, inverse = _unique_of(table, ids, table_name)
    if cut.dim == 1:
        columns = local_rows(table, unique)
        whole = gather(columns, 1, line, f"{path}_columns")
        return with_length(whole, 1, cut.length), inverse

    mine, exchange = _exchange(unique, cut, line, path)
    start, _ = cut.bounds()
    rows = local_rows(table, tf.gather(unique, mine) - start)
    return _with_gradient(exchange, lambda grad: tf.gather(grad, mine))(rows), inverse


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

    mine, exchange = _exchange(unique, cut, line, path)
    is_mine = _owner(ids, cut) == cut.index
    own = tf.boolean_mask(places, is_mine)
    place_among_own = tf.cumsum(tf.cast(is_mine, tf.int32)) - 1

    def of_rows(rows):
        rows = tf.gather(rows, tf.gather(place_among_own, tf.gather(first, mine)))
        return tf.gather(exchange(rows), inverse)

    start, _ = cut.bounds()
    rows = local_rows(table, tf.gather(ids, own) - start)
    return _with_gradient(of_rows, lambda grad: tf.gather(grad, own))(rows)


def _with_gradient(function, back):
    return tf.custom_gradient(lambda rows: (function(rows), back))


def _exchange(unique, cut, line, path):
    """Which of the unique ids this rank owns, and a function from their rows to those of all."""
    name, owner = unique_in_graph(f"{path}_rows"), _owner(unique, cut)
    by_owner = tf.argsort(owner, stable=True)  # the order in which the ranks' rows arrive
    mine = tf.boolean_mask(by_owner, tf.gather(owner, by_owner) == cut.index)
    position = tf.math.invert_permutation(by_owner)

    def exchange(rows):
        return tf.gather(
            exchange_order.collective_in_turn(line, "all_gather", rows, name), position
        )

    return mine, exchange


def _owner(ids, cut):
    """The shard that holds each id."""
    ends = [shard_bounds(cut.length, cut.num_shards, i)[1] for i in range(cut.num_shards)]
    return tf.searchsorted(tf.constant(ends, ids.dtype), ids, side="right")


def _batch_normalization(layer):
    """Statistics must be those of whole batches, so every rank normalizes all samples."""
    current = layer._sok_distribution
    line = current.mesh.along(current.batch_dim_name)
    if line.world_size == 1:
        return None
    own_call = type(layer).call

    def run(inputs, training=None, mask=None):
        if not training or mask is not None or not getattr(of_call, "split", False):
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
        with attributes(layer, {"gradient_scale": "mean"}):
            rows = own_call(layer, inputs, training=training)
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
