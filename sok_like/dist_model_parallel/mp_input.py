"""Lookup of model-parallel input: each rank has the ids of its own tables, for all samples.

    ids of the global batch -> lookup here -> split by rank =header, rows=> concatenate columns

No ids are exchanged. A header, the one int64 exchange, tells the receiver how many rows each output
has, and whether the sender failed. The rows are one exchange of floats, and so is their gradient.

The keys of a hash table go to their owners first, by the exchange of data-parallel input: two more
collectives, after the header, and one more for the gradient.

    header (int64)   [fault, input, id | local batch, hotness of the first input | of the next ..]

Outputs are 3-D, `[local_batch, hotness, dim]`, without a combiner, and 2-D with one. They cannot
depend on the kind of an input, which only the ranks that have it know.
"""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from sok_like.lookup import exchange
from sok_like.lookup.flat_ids import FlatIds
from sok_like.lookup.local_variables import unique_in_graph
from sok_like.runtime import comm

_BAD_ID, _BAD_BATCH = 1, 2
_PER_INPUT = 2  # words of a header: local batch, hotness


def output_shapes(layer: Any) -> list[tuple[int | None, ...]]:
    """Static shape of each output."""
    plan = layer.strategy.plan
    shapes: list[tuple[int | None, ...]] = []
    for table_id in plan.input_table_map:
        dim = plan.tables[table_id].output_dim
        combined = layer.combiner_of(table_id) is not None
        shapes.append((None, dim) if combined else (None, None, dim))
    return shapes


def mp_input_lookup(
    layer: Any, inputs: list[Any], tables: dict[tuple[int, int], Any], training: bool
) -> list[tf.Tensor]:
    """Outputs for this rank's samples, in input order.

    Args:
        layer: The `DistributedEmbedding`.
        inputs: The inputs `strategy.input_ids_list[rank]`, for the global batch.
        tables: The layer's variables, by kind and position.
        training: Whether hash tables insert missing keys.

    Raises:
        ValueError: an input of a table without a combiner is not a dense 2-D tensor.
        tf.errors.InvalidArgumentError: an id is outside its table, or the global batch is not
            divisible by the number of ranks; on all ranks, with the rank at fault.
    """
    communicator, world_size = comm.current(), layer.world_size
    name = unique_in_graph(layer.name)
    mine = layer.strategy.input_ids_list[layer.rank]
    samples, header = {}, [tf.zeros([3], tf.int64)]
    for i, ids in zip(mine, inputs, strict=True):
        flat, fault, sizes = _prepare(layer, i, ids)
        samples[i] = flat
        # Only the first fault is reported.
        header[0] = tf.where(header[0][0] == 0, fault, header[0])
        header.append(sizes)
    joined = tf.concat(header, 0)
    received, _ = communicator.all_to_all(
        tf.tile(joined, [world_size]),
        tf.fill([world_size], tf.size(joined)),
        f"{name}_header",
    )
    lengths = [3 + _PER_INPUT * len(ids) for ids in layer.strategy.input_ids_list]
    received = tf.ensure_shape(received, [sum(lengths)])
    with tf.control_dependencies(_raise_faults(layer, received)):
        received = tf.identity(received)
        found = _lookup_hashed(layer, samples, tables, training, f"{name}_hashed")
    dense = [i for i in mine if i not in found]
    features = [_feature(layer, i, samples[i], tables) for i in dense]
    found.update(zip(dense, exchange.lookup_here(features), strict=True))
    outputs = [samples[i].restore(found.pop(i)) for i in mine]
    message, words = _message(layer, outputs, header[1:], list(found.values()))
    arrived, _ = communicator.all_to_all(message, tf.fill([world_size], words), f"{name}_rows")
    return _assemble(layer, arrived, received)


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
        empty = FlatIds(tf.zeros([0, 1], tf.int64), layer.combiner_of(table_of[i]), hashed=True)
        features.append(_feature(layer, i, samples.get(i, empty), tables))
    rows = exchange.exchange_lookup(
        features,
        layer.anchor(),
        comm.current(),
        name,
        training=training,
        gradient_scale=1.0,  # the message of all outputs divides the gradient
    )
    return dict(zip(inputs, rows, strict=True))


def _prepare(layer, i, ids):
    """An input as flat ids, its fault `[3]` and its sizes `[2]`."""
    table_id = layer.strategy.plan.input_table_map[i]
    combiner = layer.combiner_of(table_id)
    ragged = isinstance(ids, (tf.RaggedTensor, tf.SparseTensor))
    if combiner is None and (ragged or ids.shape.rank != 2):
        raise ValueError(
            "With dp_input=False an input without a combiner must be a dense tensor "
            f"[global_batch, hotness], on more than one rank. Received: {ids!r} (input {i})"
        )
    flat = layer.flatten(i, ids)
    batch = ids.nrows() if isinstance(ids, tf.RaggedTensor) else tf.shape(ids, tf.int64)[0]
    batch = tf.cast(batch, tf.int64)
    hotness = tf.shape(ids, tf.int64)[1] if combiner is None else tf.ones([], tf.int64)
    number, fault = tf.constant(i, tf.int64), tf.zeros([3], tf.int64)
    bad_batch = tf.stack([tf.constant(_BAD_BATCH, tf.int64), number, batch])
    fault = tf.where(batch % layer.world_size != 0, bad_batch, fault)
    if not layer.is_hashed(table_id):
        num_rows = layer.strategy.plan.tables[table_id].input_dim
        in_range = (flat.ids >= 0) & (flat.ids < num_rows)
        outside = tf.boolean_mask(flat.ids, ~in_range)
        wrong = tf.reduce_sum(outside[:1])
        bad_id = tf.stack([tf.constant(_BAD_ID, tf.int64), number, wrong])
        fault = tf.where(tf.size(outside) > 0, bad_id, fault)
        # Faulty ids are never looked up: the header is read first.
        flat.ids = tf.where(in_range, flat.ids, tf.zeros_like(flat.ids))
    return flat, fault, tf.stack([batch // layer.world_size, hotness])


def _headers(layer, received):
    """By rank: the fault `[3]`, and the sizes of each of its inputs `[2]`."""
    headers, at = [], 0
    for inputs in layer.strategy.input_ids_list:
        fault, at = received[at : at + 3], at + 3
        sizes = []
        for _ in inputs:
            sizes.append(received[at : at + _PER_INPUT])
            at += _PER_INPUT
        headers.append((fault, sizes))
    return headers


def _raise_faults(layer, received):
    """Raises if any rank reports a fault; in a graph returns the op that raises."""
    headers = _headers(layer, received)
    faults = tf.stack([fault for fault, _ in headers])
    rank = tf.argmax(tf.cast(faults[:, 0] > 0, tf.int32))
    kind, i, value = tf.unstack(faults[rank])
    names = [layer.table_name(t) for t in layer.strategy.plan.input_table_map]
    table = tf.gather(tf.constant(names), i)
    number = tf.strings.as_string(value)
    what = tf.where(
        kind == _BAD_ID,
        tf.strings.join(["an id outside table '", table, "': id ", number]),
        tf.strings.join(
            ["a global batch not divisible by the number of ranks: ", number, " samples"]
        ),
    )
    batches = tf.stack([sizes[0] for _, of_rank in headers for sizes in of_rank])
    alike = tf.reduce_all(batches == batches[0])
    what = tf.where(kind == 0, "inputs of different global batches", what)
    place = [tf.strings.as_string(x) for x in (rank, i)]
    text = tf.strings.join(["rank ", place[0], ": input ", place[1], " has ", what])
    fine = (kind == 0) & alike
    if tf.executing_eagerly():
        if not fine:
            raise tf.errors.InvalidArgumentError(None, None, text.numpy().decode())
        return []
    return [tf.debugging.Assert(fine, [text])]


@tf.custom_gradient
def _divide_gradient(values, divisor):
    def back(grad):
        return grad / divisor, None

    return tf.identity(values), back


def _message(layer, outputs, sizes, empty):
    """Rows for all ranks, flat, and the number of floats for each rank.

    It includes `empty` tensors so that their gradients, which are collectives, are computed.
    """
    world_size, blocks = layer.world_size, []
    for output, size in zip(outputs, sizes, strict=True):
        words = size[0] * size[1] * output.shape[-1]
        block = tf.reshape(tf.cast(output, tf.float32), tf.stack([world_size, words]))
        blocks.append(block)
    anchor = layer.anchor()
    if anchor is not None:
        empty = [*empty, tf.gather(anchor, tf.zeros([0], tf.int64))]
    blocks += [tf.reshape(tf.cast(tensor, tf.float32), [world_size, 0]) for tensor in empty]
    message = tf.concat(blocks, 1)
    words = tf.shape(message)[1]
    message = _divide_gradient(tf.reshape(message, [-1]), tf.constant(float(world_size)))
    return message, words


def _assemble(layer, arrived, received):
    """Concatenates the ranks' columns of each output; outputs are in input order."""
    plan = layer.strategy.plan
    sizes, shapes, numbers = [], [], []
    for rank, (_, of_rank) in enumerate(_headers(layer, received)):
        for i, size in zip(layer.strategy.input_ids_list[rank], of_rank, strict=True):
            table_id = plan.input_table_map[i]
            dim = layer.shard_of(table_id, rank).dim
            sizes.append(size[0] * size[1] * dim)
            kept = size[:1] if layer.combiner_of(table_id) else size
            shapes.append(tf.concat([kept, [dim]], 0))
            numbers.append(i)
    columns: dict[int, list[tf.Tensor]] = {}
    parts = tf.split(arrived, tf.stack(sizes))
    for i, part, shape in zip(numbers, parts, shapes, strict=True):
        columns.setdefault(i, []).append(tf.reshape(part, shape))
    static = output_shapes(layer)
    outputs = [tf.concat(columns[i], -1) for i in range(len(columns))]
    return [tf.ensure_shape(o, shape) for o, shape in zip(outputs, static, strict=True)]
