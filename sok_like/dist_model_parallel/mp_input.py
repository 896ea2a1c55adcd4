"""Lookup of model-parallel input: each rank has the ids of its own tables, for all samples.

    ids of the global batch -> lookup here -> split by rank =sizes, rows=> concatenate columns

No ids are exchanged. One int64 exchange tells the receivers how many rows each output has, and
whether a sender failed. The rows take one exchange of floats, and so does their gradient.

The keys of a hash table first go to their owners, by the exchange of data-parallel input. That
takes two more collectives, after the sizes, and one more for the gradient.

Outputs are `[local_batch, dim]` with a combiner, and for inputs `[global_batch]`. Without one,
inputs `[global_batch, hotness]` give `[local_batch, hotness, dim]`. Only the ranks that have an
input know its axes; the others learn them at run time, too late for a graph, whose shapes must be
known before. So in a graph all inputs without a combiner must have the same number of axes, which
each rank takes from its own inputs.
"""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from sok_like.lookup import exchange, same_weights
from sok_like.lookup.dense_lookup import legal_ids
from sok_like.lookup.flat_ids import FlatIds
from sok_like.lookup.local_variables import unique_in_graph
from sok_like.runtime.native import libraries
from sok_like.runtime.ranks import comm, exchange_order

_PER_INPUT = 2  # sizes: local batch, hotness (-1 for an input of one axis)
_ODD = "global batch not divisible by"
_HEAD = 16  # floats before the rows for a rank, which name the call


class NotDivisibleError(tf.errors.InvalidArgumentError, ValueError):
    """The global batch is not divisible by the number of ranks; a ValueError, as in DMP."""


def output_shapes(layer: Any, inputs: list[Any]) -> list[tuple[int | None, ...]]:
    """Static shape of each output in a graph; `inputs` are this rank's own, of either Keras."""
    plan, axes = layer.strategy.plan, _axes(layer, inputs)
    shapes: list[tuple[int | None, ...]] = []
    for table_id in plan.input_table_map:
        dim = plan.tables[table_id].output_dim
        flat = axes == 1 or layer._combiners[table_id] is not None
        shapes.append((None, dim) if flat else (None, None, dim))
    return shapes


def _axes(layer, inputs):
    """The number of axes of this rank's inputs without a combiner: 1 or 2; 0 if it has both."""
    mine, table_of = layer.strategy.input_ids_list[layer.rank], layer.strategy.plan.input_table_map
    ranks = {
        len(ids.shape)
        for i, ids in zip(mine, inputs, strict=True)
        if layer._combiners[table_of[i]] is None
    }
    return 0 if len(ranks) > 1 else next(iter(ranks), 2)


def mp_input_lookup(
    layer: Any, inputs: list[Any], tables: dict[tuple[int, int], Any], training: bool
) -> list[tf.Tensor]:
    """Outputs for this rank's samples, in input order.

    Raises tf.errors.InvalidArgumentError on all ranks, naming the rank at fault.
    """
    communicator, world_size = comm.current(), layer.world_size
    name = unique_in_graph(layer.name)
    mine = layer.strategy.input_ids_list[layer.rank]
    # Outside of graphs any number of axes is fine.
    axes = 0 if tf.executing_eagerly() else _axes(layer, inputs) or -1
    samples, problems, sizes = {}, [], [tf.constant([axes], tf.int64)]
    for i, ids in zip(mine, inputs, strict=True):
        samples[i], wrong, of_input = _prepare(layer, i, ids)
        problems += wrong
        sizes.append(of_input)
    try:
        notes = tf.concat(sizes, 0)
        received, _ = exchange_order.exchange_notes(
            notes, problems, communicator, name, _said(layer, name)
        )
    except tf.errors.InvalidArgumentError as error:
        if _ODD not in error.message:
            raise
        raise NotDivisibleError(None, None, error.message) from error
    num_inputs = sum(len(ids) for ids in layer.strategy.input_ids_list)
    received = tf.ensure_shape(received, [world_size + _PER_INPUT * num_inputs])
    axes_told, received = _split_notes(layer, received)
    checks = [*_require_equal_batches(received), *_require_axes(layer, axes_told, received)]
    with tf.control_dependencies(checks):
        received = tf.identity(received)
    static = None if tf.executing_eagerly() else output_shapes(layer, inputs)
    # All ranks know the sizes of all ranks' messages, so all raise.
    words = [
        tf.add_n([tf.constant(_HEAD, tf.int64), *(words for _, words, _ in of_rank)])
        for of_rank in _outputs_of_ranks(layer, received, static)
    ]
    fitting = libraries.ops().sok_check_blocks(words=tf.stack(words))
    with tf.control_dependencies([] if fitting is None else [fitting]):
        received = tf.identity(received)
        found = _lookup_hashed(layer, samples, tables, training, f"{name}_hashed")
    dense = [i for i in mine if i not in found]
    features = [_feature(layer, i, samples[i], tables) for i in dense]
    found.update(zip(dense, exchange.lookup_here(features), strict=True))
    outputs = [samples[i].restore(found.pop(i)) for i in mine]
    with exchange_order.turn() as done:
        message, words = _message(layer, outputs, sizes[1:], list(found.values()), name)
        lookup = exchange_order.Lookup(
            communicator, name, same_weights.comparison(), layer.wire_dtype
        )
        arrived, _, call = exchange_order.exchange_rows(
            message, tf.fill([world_size], words), lookup
        )
        done.append(call)
    return _assemble(layer, arrived, received, call, static)


def _said(layer, name):
    """The call and what ranks must agree on: otherwise rows of another table would be misread."""
    plan = layer.strategy.plan
    places = [
        f"{plan.tables[i].input_dim}x{s.dim} of {s.owner} at {s.row_offset} {layer._combiners[i]}"
        for i in plan.input_table_map
        for s in layer._shards[i]
    ]
    return f"{name}: {', '.join(places)}"


def _feature(layer, i, samples, tables):
    table_id = layer.strategy.plan.input_table_map[i]
    return layer.feature(table_id, layer.shard_of(table_id, layer.rank), samples, tables)


def _lookup_hashed(layer, samples, tables, training, name):
    """Rows of all inputs of hash tables, by input; empty for inputs of other ranks."""
    table_of = layer.strategy.plan.input_table_map
    inputs = [i for i, table_id in enumerate(table_of) if layer.is_hashed(table_id)]
    if not inputs:
        return {}
    features = []
    for i in inputs:
        empty = FlatIds(tf.zeros([0, 1], tf.int64), layer._combiners[table_of[i]], hashed=True)
        features.append(_feature(layer, i, samples.get(i, empty), tables))
    # The message of all outputs scales the gradient.
    how = exchange.Exchange(name, training, layer.anchor(), 1.0, layer.wire_dtype)
    return dict(zip(inputs, exchange.exchange_lookup(features, how), strict=True))


def _prepare(layer, i, ids):
    """An input as flat ids, texts that say what is wrong with it, and its sizes `[2]`."""
    table_id = layer.strategy.plan.input_table_map[i]
    combiner = layer._combiners[table_id]
    ragged = isinstance(ids, (tf.RaggedTensor, tf.SparseTensor))
    if combiner is None and (ragged or ids.shape.rank not in (1, 2)):
        raise ValueError(
            "With dp_input=False on more than one rank, an input without a combiner must be a "
            "dense tensor [global_batch] or [global_batch, hotness]. "
            f"Received: {ids!r} (input {i})"
        )
    flat = layer.flatten(i, ids)
    batch = ids.nrows() if isinstance(ids, tf.RaggedTensor) else tf.shape(ids, tf.int64)[0]
    batch = tf.cast(batch, tf.int64)
    hotness = tf.ones([], tf.int64)
    if combiner is None:
        one_axis = ids.shape.rank == 1
        hotness = -hotness if one_axis else tf.shape(ids, tf.int64)[1]
    what = f"input {i} has a {_ODD} the number of ranks: "
    odd = tf.strings.join([what, tf.strings.as_string(batch), " samples"])
    problems = [tf.where(batch % layer.world_size != 0, odd, "")]
    if not layer.is_hashed(table_id):
        num_rows = layer.strategy.plan.tables[table_id].input_dim
        # Errors about ids are raised before they are looked up.
        flat.ids, wrong = legal_ids(flat.ids, num_rows, layer._names[table_id])
        problems.append(wrong)
    return flat, problems, tf.stack([batch // layer.world_size, hotness])


def _split_notes(layer, received):
    """The number of axes that each rank assumes, `[world_size]`, and all sizes, flat."""
    axes, sizes = [], []
    for inputs in layer.strategy.input_ids_list:
        start = len(axes) + _PER_INPUT * sum(map(len, layer.strategy.input_ids_list[: len(axes)]))
        axes.append(received[start])
        sizes.append(received[start + 1 : start + 1 + _PER_INPUT * len(inputs)])
    return tf.stack(axes), tf.concat(sizes, 0)


def _require_axes(layer, told, received):
    """Ops that raise on all ranks if a graph's shapes are not those of the inputs."""
    if tf.executing_eagerly():
        return []
    table_of = layer.strategy.plan.input_table_map
    inputs = [i for ids in layer.strategy.input_ids_list for i in ids]
    plain = [k for k, i in enumerate(inputs) if layer._combiners[table_of[i]] is None]
    if not plain:
        return []
    hotness = tf.gather(received[1::_PER_INPUT], plain)
    axes = tf.where(hotness < 0, tf.ones_like(hotness), 2 * tf.ones_like(hotness))
    alike = tf.reduce_all(axes == axes[0]) & tf.reduce_all(told == axes[0])
    rule = (
        "In a graph, with dp_input=False on more than one rank, all inputs without a combiner must "
        "be [global_batch], or all [global_batch, hotness]; ranks without such inputs assume the "
        "latter. Received: numbers of axes, rank after rank, "
    )
    text = tf.strings.reduce_join(tf.strings.as_string(axes), separator=", ")
    return [tf.debugging.Assert(alike, [tf.strings.join([rule, text])])]


def _outputs_of_ranks(layer, received, static):
    """For each rank and each of its inputs: its number, the floats of its block, and its shape."""
    found = []
    sizes = iter(tf.unstack(tf.reshape(received, [-1, _PER_INPUT])))  # rank after rank
    for rank, inputs in enumerate(layer.strategy.input_ids_list):
        found.append([])
        for i, size in zip(inputs, sizes, strict=False):
            table_id = layer.strategy.plan.input_table_map[i]
            dim = layer.shard_of(table_id, rank).dim
            # A hotness of -1 means that there is only one axis.
            flat = len(static[i]) == 2 if static is not None else int(size[1]) < 0
            kept = size[:1] if layer._combiners[table_id] or flat else size
            found[-1].append((i, size[0] * tf.abs(size[1]) * dim, tf.concat([kept, [dim]], 0)))
    return found


def _require_equal_batches(received):
    """Raises, or in a graph returns ops that raise, on all ranks: all know all sizes."""
    batches = received[::_PER_INPUT]
    alike = tf.reduce_all(batches == batches[0])
    samples = tf.strings.reduce_join(tf.strings.as_string(batches), separator=", ")
    rule = "all inputs must have the same global batch. Received samples per rank, input by input: "
    text = tf.strings.join([rule, samples])
    if tf.executing_eagerly():
        if not alike:
            raise tf.errors.InvalidArgumentError(None, None, text.numpy().decode())
        return []
    return [tf.debugging.Assert(alike, [text])]


def _message(layer, outputs, sizes, empty, name):
    """Rows for all ranks, flat, and the number of floats for each rank.

    It includes `empty` tensors so that their gradients, which are collectives, are computed.
    """
    world_size = layer.world_size
    head = exchange_order.head_of_rows(name, layer.wire_dtype)
    blocks = [tf.tile(head[None], [world_size, 1])]
    for output, size in zip(outputs, sizes, strict=True):
        words = size[0] * tf.abs(size[1]) * output.shape[-1]
        block = tf.reshape(tf.cast(output, tf.float32), tf.stack([world_size, words]))
        blocks.append(block)
    anchor = layer.anchor()
    if anchor is not None:
        empty = [*empty, tf.gather(anchor, tf.zeros([0], tf.int64))]
    blocks += [tf.reshape(tf.cast(tensor, tf.float32), [world_size, 0]) for tensor in empty]
    message = tf.concat(blocks, 1)
    words = tf.shape(message)[1]

    @tf.custom_gradient
    def divide_gradient(values):
        return tf.identity(values), lambda gradient: gradient / float(world_size)

    return divide_gradient(tf.reshape(message, [-1])), words


def _cut(arrived, sizes, heads, call):
    """The parts of a message. In the gradient, parts numbered in `heads` name their call."""

    @tf.custom_gradient
    def run(arrived):
        def back(*grads):
            head = exchange_order.head_of_gradients(call)
            return tf.concat([head if i in heads else g for i, g in enumerate(grads)], 0)

        return tf.split(arrived, tf.stack(sizes)), back

    return run(arrived)


def _assemble(layer, arrived, received, call, static):
    """Joins the ranks' columns, in input order; `static`: their shapes in a graph."""
    sizes, shapes, numbers, heads = [], [], [], []
    for of_rank in _outputs_of_ranks(layer, received, static):
        heads.append(len(sizes))
        sizes.append(tf.constant(_HEAD, tf.int64))
        for i, words, shape in of_rank:
            sizes.append(words)
            shapes.append(shape)
            numbers.append(i)
    columns: dict[int, list[tf.Tensor]] = {}
    parts = _cut(arrived, sizes, heads, call)
    parts = [part for place, part in enumerate(parts) if place not in heads]
    for i, part, shape in zip(numbers, parts, shapes, strict=True):
        columns.setdefault(i, []).append(tf.reshape(part, shape))
    outputs = [tf.concat(columns[i], -1) for i in range(len(columns))]
    if static is None:
        return outputs
    return [tf.ensure_shape(o, shape) for o, shape in zip(outputs, static, strict=True)]
