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

from typing import Any

import tensorflow as tf

from sok_like.lookup import exchange, replicas
from sok_like.lookup.dense_lookup import as_tf_table, legal_ids
from sok_like.lookup.ids import FlatIds, num_samples
from sok_like.lookup.local_variables import unique_in_graph
from sok_like.planner.tables import HASHED
from sok_like.runtime.framework.graphs import checked
from sok_like.runtime.native import libraries
from sok_like.runtime.ranks import comm, exchange_order

_ODD = "global batch not divisible by"
_HEAD = 16  # floats before the rows for a rank, which name the call


class NotDivisibleError(tf.errors.InvalidArgumentError, ValueError):
    """The global batch is not divisible by the number of ranks; a ValueError, as in DMP."""


def output_shapes(layer: Any, inputs: list[Any]) -> list[tuple[int | None, ...]]:
    """Static shape of each output in a graph; `inputs` are this rank's own, of either Keras."""
    leading = (None,) * (_axes(layer, inputs) or 2)
    tables = layer._tables_of_inputs
    return [(*(leading if table.combiner is None else (None,)), table.dim) for table in tables]


def _axes(layer, inputs):
    """The number of axes of this rank's inputs without a combiner: 1 or 2; 0 if it has both."""
    tables = [layer._tables_of_inputs[i] for i in layer.strategy.input_ids_list[layer.rank]]
    pairs = zip(tables, inputs, strict=True)
    ranks = {len(ids.shape) for table, ids in pairs if table.combiner is None}
    return 0 if len(ranks) > 1 else next(iter(ranks), 2)


def mp_input_lookup(
    layer: Any, inputs: list[Any], variables: dict[int, Any], training: bool
) -> list[tf.Tensor]:
    """Outputs for this rank's samples, in input order; all ranks raise what is wrong on one."""
    communicator, world_size = comm.current(), layer.world_size
    name = unique_in_graph(layer.name)
    own_inputs = layer.strategy.input_ids_list[layer.rank]
    # Outside of graphs any number of axes is fine.
    axes = 0 if tf.executing_eagerly() else _axes(layer, inputs) or -1
    samples, problems, sizes = {}, [], [tf.constant([axes], tf.int64)]
    for i, ids in zip(own_inputs, inputs, strict=True):
        samples[i], wrong, of_input = _prepare(layer, i, ids)
        problems += wrong
        sizes.append(of_input)
    # Ranks must agree on the places of tables: otherwise rows of another one would be misread.
    places = [
        f"{table.num_rows}x{s.num_columns} of {table.owner(s)} at {s.first_row} {table.combiner}"
        for table in layer._tables_of_inputs
        for s in table.shards
    ]
    call = f"{name}: {', '.join(places)}"
    try:
        notes = tf.concat(sizes, 0)
        received, _ = exchange_order.exchange_notes(notes, communicator, name, problems, call)
    except tf.errors.InvalidArgumentError as error:
        if _ODD not in error.message:
            raise
        raise NotDivisibleError(None, None, error.message) from error
    received = _checked_sizes(layer, received)
    static = None if tf.executing_eagerly() else output_shapes(layer, inputs)
    # All ranks know the sizes of all ranks' messages, so all raise.
    parts_of_ranks = _parts_of_ranks(layer, received, static)
    words = [tf.add_n([words for _, words, _ in parts]) for parts in parts_of_ranks]
    fitting = libraries.ops().sok_check_blocks(words=tf.stack(words))
    with tf.control_dependencies([fitting]):
        rows = _lookup_hashed(layer, samples, variables, training, f"{name}_hashed")
    dense = [i for i in own_inputs if i not in rows]
    tables = layer._tables_of_inputs
    features = [layer.feature(tables[i], samples[i], variables) for i in dense]
    rows.update(zip(dense, exchange.lookup_here(features), strict=True))
    outputs = [samples[i].restore(rows.pop(i)) for i in own_inputs]
    with exchange_order.turn() as done:
        # What is left in `rows` is empty: inputs of other ranks.
        message, words = _message(layer, outputs, sizes[1:], list(rows.values()), name)
        lookup = exchange_order.Lookup(communicator, name, replicas.comparison(), layer.wire_dtype)
        splits = tf.fill([world_size], words)
        arrived, _, call = exchange_order.exchange_rows(message, splits, lookup)
        done.append(call)
    parts = [part for parts in parts_of_ranks for part in parts]
    return _assemble(parts, arrived, call, static)


def _lookup_hashed(layer, samples, variables, training, name):
    """Rows of all inputs of hash tables, by input; empty for inputs of other ranks."""
    inputs = {i: t for i, t in enumerate(layer._tables_of_inputs) if t.kind == HASHED}
    if not inputs:
        return {}
    features = []
    for i, table in inputs.items():
        empty = FlatIds(tf.zeros([0, 1], tf.int64), table.combiner, hashed=True)
        features.append(layer.feature(table, samples.get(i, empty), variables))
    # The message of all outputs scales the gradient.
    how = exchange.Exchange(name, training, as_tf_table(layer._anchor), 1.0, layer.wire_dtype)
    return dict(zip(inputs, exchange.exchange_lookup(features, how), strict=True))


def _prepare(layer, i, ids):
    """An input as flat ids, texts that say what is wrong with it, and its sizes `[2]`.

    The sizes are the local batch, and the hotness (-1 for an input of one axis).
    """
    table = layer._tables_of_inputs[i]
    ragged = isinstance(ids, (tf.RaggedTensor, tf.SparseTensor))
    if table.combiner is None and (ragged or ids.shape.rank not in (1, 2)):
        raise ValueError(
            "With dp_input=False on more than one rank, an input without a combiner must be a "
            "dense tensor [global_batch] or [global_batch, hotness]. "
            f"Received: {ids!r} (input {i})"
        )
    flat = layer.flatten(i, ids)
    batch = num_samples(ids)
    hotness = tf.ones([], tf.int64)
    if table.combiner is None:
        hotness = -hotness if ids.shape.rank == 1 else tf.shape(ids, tf.int64)[1]
    what = f"input {i} has a {_ODD} the number of ranks: "
    odd = tf.strings.join([what, tf.strings.as_string(batch), " samples"])
    problems = [tf.where(batch % layer.world_size != 0, odd, "")]
    if table.kind != HASHED:
        # Errors about ids are raised before they are looked up.
        flat.ids, wrong = legal_ids(flat.ids, table.num_rows, table.name)
        problems.append(wrong)
    return flat, problems, tf.stack([batch // layer.world_size, hotness])


def _checked_sizes(layer, notes):
    """The sizes of all inputs, rank after rank; raises on all ranks if they do not fit."""
    inputs = layer.strategy.input_ids_list
    lengths = [length for of_rank in inputs for length in (1, 2 * len(of_rank))]
    parts = tf.split(tf.ensure_shape(notes, [sum(lengths)]), lengths)
    axes_by_rank, sizes = tf.concat(parts[::2], 0), tf.reshape(tf.concat(parts[1::2], 0), [-1, 2])
    batches = sizes[:, 0]
    rule = "all inputs must have the same global batch. Received samples per rank, input by input: "
    sizes = checked(sizes, tf.reduce_all(batches == batches[0]), rule, _listed(batches))
    tables = [layer._tables_of_inputs[i] for of_rank in inputs for i in of_rank]
    plain = [k for k, table in enumerate(tables) if table.combiner is None]
    if tf.executing_eagerly() or not plain:
        return sizes
    # In a graph the shapes were known before the inputs of other ranks.
    hotness = tf.gather(sizes[:, 1], plain)
    axes = tf.where(hotness < 0, tf.ones_like(hotness), 2 * tf.ones_like(hotness))
    alike = tf.reduce_all(axes == axes[0]) & tf.reduce_all(axes_by_rank == axes[0])
    rule = (
        "In a graph, with dp_input=False on more than one rank, all inputs without a combiner must "
        "be [global_batch], or all [global_batch, hotness]; ranks without such inputs assume the "
        "latter. Received: numbers of axes, rank after rank, "
    )
    return checked(sizes, alike, rule, _listed(axes))


def _listed(numbers):
    return tf.strings.reduce_join(tf.strings.as_string(numbers), separator=", ")


def _parts_of_ranks(layer, sizes, static):
    """By rank, its head, and for each of its inputs: its number, number of floats, and shape."""
    parts = []
    sizes = iter(tf.unstack(sizes))  # rank after rank
    for rank, inputs in enumerate(layer.strategy.input_ids_list):
        parts.append([(None, tf.constant(_HEAD, tf.int64), None)])
        for i, size in zip(inputs, sizes, strict=False):
            table = layer._tables_of_inputs[i]
            dim = table.shard_of(rank).num_columns
            flat = len(static[i]) == 2 if static is not None else int(size[1]) < 0
            leading = size[:1] if table.combiner or flat else size
            parts[-1].append((i, size[0] * tf.abs(size[1]) * dim, tf.concat([leading, [dim]], 0)))
    return parts


def _message(layer, outputs, sizes, empty, name):
    """Rows for all ranks, flat, and their number of floats; `empty` are there for the gradients."""
    world_size = layer.world_size
    head = exchange_order.head_of_rows(name, layer.wire_dtype)
    blocks = [tf.tile(head[None], [world_size, 1])]
    for output, size in zip(outputs, sizes, strict=True):
        words = size[0] * tf.abs(size[1]) * output.shape[-1]
        block = tf.reshape(tf.cast(output, tf.float32), tf.stack([world_size, words]))
        blocks.append(block)
    if layer._anchor is not None:
        empty = [*empty, tf.gather(as_tf_table(layer._anchor), tf.zeros([0], tf.int64))]
    blocks += [tf.reshape(tf.cast(tensor, tf.float32), [world_size, 0]) for tensor in empty]
    message = tf.concat(blocks, 1)
    words = tf.shape(message)[1]
    divided = tf.custom_gradient(lambda m: (tf.identity(m), lambda grad: grad / float(world_size)))
    return divided(tf.reshape(message, [-1])), words


def _assemble(parts, arrived, call, static):
    """Joins the ranks' columns, in input order; `static`: their shapes in a graph."""
    inputs, words, shapes = zip(*parts, strict=True)

    @tf.custom_gradient
    def cut(arrived):
        def back(*gradients):
            head = exchange_order.head_of_gradients(call)
            pairs = zip(inputs, gradients, strict=True)
            return tf.concat([head if i is None else g for i, g in pairs], 0)

        return tf.split(arrived, tf.stack(words)), back

    columns: dict[int, list[tf.Tensor]] = {}
    for i, shape, block in zip(inputs, shapes, cut(arrived), strict=True):
        if i is not None:
            columns.setdefault(i, []).append(tf.reshape(block, shape))
    joined = [tf.concat(columns[i], -1) for i in range(len(columns))]
    if static is None:
        return joined
    return [tf.ensure_shape(o, shape) for o, shape in zip(joined, static, strict=True)]
