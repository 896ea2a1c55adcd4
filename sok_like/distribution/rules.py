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

import functools
import itertools
import re
import string
import threading
from collections.abc import Callable
from typing import Any, NamedTuple

import tensorflow as tf

from sok_like.dist_model_parallel.embedding import Embedding
from sok_like.distribution import collectives
from sok_like.distribution.sharded_variable import held_whole, local_rows, shard_of
from sok_like.embeddings.all2all_dense_embedding import All2AllDenseEmbedding
from sok_like.embeddings.distributed_embedding import DistributedEmbedding
from sok_like.lookup import exporting
from sok_like.lookup.dense_lookup import check_ids, lookup_rows, require_in_range
from sok_like.lookup.ids import FlatIds, as_row_numbers, flat_values, with_flat_values
from sok_like.lookup.local_variables import unique_in_graph
from sok_like.planner.placement import even_part
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

    layer.__dict__.update(  # bypasses Keras' tracking of attributes
        _sok_distribution=distribution,
        call=tf.autograph.experimental.do_not_convert(loop if loops else call),
        supports_jit=False,  # XLA cannot compile collectives of ranks
    )


def _only_cut(variable):
    """The `Cut` of a variable with exactly one, unless it is along the batch axis; else None."""
    shard = shard_of(variable)
    if shard is None or len(shard.cuts) != 1 or shard.over_batch:
        return None
    return shard.cuts[0]


def _variable(layer, name):
    """The variable itself, not Keras 3's property."""
    return vars(layer).get(f"_{name}", getattr(layer, name, None))


def _product(layer, dims, compute, as_addend=tf.convert_to_tensor):
    """The rule of a layer with one sharded kernel dimension; `dims`: in inputs and in outputs."""
    # `compute` makes outputs without the bias; `as_addend` shapes a bias to be added to them.
    kernel, bias, (input_dim, output_dim) = _variable(layer, "kernel"), layer.bias, dims
    shard, cut = shard_of(kernel), _only_cut(kernel)
    line, name = shard.mesh.along(cut.axis), shard.path
    # A vector that is sharded like the output needs no collective.
    can_ride = bias is not None and output_dim is not None and len(bias.shape) == 1
    rides = can_ride and _only_cut(bias) == cut._replace(dim=0)

    def added(outputs, bias):
        return outputs + as_addend(tf.cast(bias, outputs.dtype))

    def run(inputs, training=None):
        inputs = tf.cast(tf.convert_to_tensor(inputs), layer.compute_dtype)
        if input_dim is None:
            inputs = collectives.shared(inputs, line, f"{name}_input")
        else:
            inputs = collectives.own_shard(inputs, input_dim, line, f"{name}_input")
        outputs = compute(inputs, tf.cast(kernel.local, inputs.dtype))
        if output_dim is None:
            outputs = collectives.summed(outputs, line, f"{name}_output")
        else:
            outputs = added(outputs, bias.local) if rides else outputs
            outputs = collectives.gather(outputs, output_dim, line, f"{name}_output")
            shape = outputs.shape.as_list()
            shape[output_dim] = cut.length
            outputs = tf.ensure_shape(outputs, shape)
        outputs = outputs if bias is None or rides else added(outputs, bias)
        return outputs if layer.activation is None else layer.activation(outputs)

    forward = "all_reduce" if output_dim is None else "all_gather"
    back = "all_reduce" if input_dim is None else "all_gather"
    of_step = f"{forward} of outputs, {back} of input gradients"
    return Rule(run, of_step, kernel, bias if rides else None)


def _einsum(layer, equation):
    cut = _only_cut(_variable(layer, "kernel"))
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

    return _product(layer, (dim(of_input), dim(of_output)), compute)


def _convolution(layer):
    kernel = _variable(layer, "kernel")
    cut = _only_cut(kernel)
    # TensorFlow cannot convolve an empty shard, and tf_keras pads causal inputs in `call`.
    if cut is None or layer.groups > 1 or layer.padding == "causal":
        return None
    if cut.length < shard_of(kernel).mesh.shape[cut.axis]:
        return None
    side = cut.dim - len(kernel.shape)  # -2: channels of the input, -1: of the output
    if side < -2:
        return None
    last = layer.data_format == "channels_last"
    channels = -1 if last else 1
    dims = (channels, None) if side == -2 else (None, channels)

    def as_addend(bias):
        return bias if last else tf.reshape(bias, [-1] + [1] * layer.rank)

    return _product(layer, dims, layer.convolution_op, as_addend)


def _keras_embedding(layer):
    table = _variable(layer, "embeddings")

    def run(inputs):
        ids = tf.convert_to_tensor(inputs)
        ids = ids if ids.dtype in (tf.int32, tf.int64) else tf.cast(ids, tf.int32)
        # Keras counts negative ids from the end.
        flat = FlatIds(tf.where(ids < 0, ids + layer.input_dim, ids), None, dtype=None)
        rows = flat.restore(_rows(table, flat.ids, layer))
        return tf.cast(rows, layer.compute_dtype)

    return None if _only_cut(table) is None else Rule(run, _LOOKUP, table)


def _sok_embedding(layer):
    table = layer.embeddings

    def run(inputs, weights=None):
        ids = inputs if tf.is_tensor(inputs) else tf.convert_to_tensor(inputs)
        check_ids(ids, layer.combiner, layer.name)
        # The rows of the unique ids form a table with new row numbers.
        unique, inverse = tf.unique(flat_values(ids))
        ids, rows = with_flat_values(ids, inverse), _rows(table, unique, layer)
        combined = lookup_rows(rows, ids, layer.combiner, weights, layer.name)
        return tf.cast(combined, layer.compute_dtype)

    return None if _only_cut(table) is None else Rule(run, _LOOKUP, table)


def _rows(table, ids, layer):
    """A row for each id, `[num_keys, output_dim]`; so is the gradient."""
    shard, cut = shard_of(table), _only_cut(table)
    line = shard.mesh.along(cut.axis)
    start, stop = shard.place.begin[cut.dim], shard.place.end[cut.dim]
    ids = require_in_range(as_row_numbers(ids), shard.global_shape[0], layer.name)
    unique, inverse = tf.unique(ids)
    places = tf.range(tf.size(ids))
    first = tf.math.unsorted_segment_min(places, inverse, tf.size(unique))

    if cut.dim == 1:
        own_rows = local_rows(table, ids)

        def exchanged(columns):
            return collectives.gather(tf.gather(columns, first), 1, line, f"{shard.path}_columns")

        def back(grad):
            return grad[:, start:stop]
    else:
        ends = [even_part(cut.length, i, line.world_size)[1] for i in range(line.world_size)]
        owner = tf.searchsorted(tf.constant(ends, ids.dtype), ids, side="right")
        of_unique = tf.gather(owner, first)
        arriving = tf.argsort(of_unique, stable=True)  # the order in which the ranks' rows arrive
        is_mine, name = owner == line.rank, unique_in_graph(f"{shard.path}_rows")
        mine = tf.boolean_mask(places, is_mine)
        own_rows = local_rows(table, tf.gather(ids, mine) - start)

        def exchanged(rows):
            own_unique = tf.boolean_mask(arriving, tf.gather(of_unique, arriving) == line.rank)
            place_among_mine = tf.cumsum(tf.cast(is_mine, tf.int32)) - 1
            rows = tf.gather(rows, tf.gather(place_among_mine, tf.gather(first, own_unique)))
            rows = exchange_order.collective_in_turn(line, "all_gather", rows, name)
            return tf.gather(rows, tf.math.invert_permutation(arriving))

        def back(grad):
            return tf.gather(grad, mine)

    rows = tf.custom_gradient(lambda rows: (tf.gather(exchanged(rows), inverse), back))(own_rows)
    return tf.ensure_shape(rows, [None, layer.output_dim])  # a graph may lose the static width


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
        whole = collectives.gather(inputs, 0, line, f"{layer.name}_samples", gradient="sum")
        outputs = own_call(layer, whole, training=training)
        return collectives.split_batch(outputs, line.world_size, line.rank)

    return Rule(run, "all_gather of inputs, reduce_scatter of their gradients")


def _hash_table(layer):
    """Also splits the samples along the model axes, so that each key is looked up once."""
    current = layer._sok_distribution
    lines = [current.mesh.along(a) for a in current.mesh.shape if a != current.batch_dim_name]
    own_call = type(layer).call

    def run(inputs, training=None):
        for line in lines:
            inputs = collectives.split_batch(inputs, line.world_size, line.rank)
        # The loss is a mean over ranks along the batch axis, and each key counts once.
        with attributes(layer, {"gradient_scale": "mean"}):
            rows = own_call(layer, inputs, training=training)
        for line in reversed(lines):
            rows = collectives.gather(rows, 0, line, f"{layer.name}_rows", gradient=line.world_size)
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
