"""Collectives along a mesh axis, with the gradients that sharded layers need.

A line is the ranks that differ only in their index along one mesh axis. Between layers, all ranks
of a line along a model axis have the same whole activations, and the same whole gradients of them.
Therefore:

    forward             backward
    gather the shards   take the own shard: all ranks have the whole gradient
    take the own shard  gather
    sum                 nothing: all ranks have the gradient
    nothing (`shared`)  sum: each rank used the activation for its own part of the result

Along the batch axis, ranks have different samples. There the gradient of gathering a *variable* is
summed (`reduce_scatter`). The gradient of gathering *outputs*, which all ranks use in the same
loss, is the own shard times the number of ranks, because gradients are later averaged along that
axis. The gradient of splitting *inputs* is divided by that factor.

Each of these is the gradient of another one, so gradients of gradients are right, too.
"""

import functools
from typing import Any

import numpy as np
import tensorflow as tf

from sok_like.lookup.ids import num_samples
from sok_like.lookup.local_variables import unique_in_graph
from sok_like.planner.placement import even_part
from sok_like.runtime.ranks.comm import Communicator
from sok_like.runtime.ranks.exchange_order import collective_in_turn as _in_turn


def gather(
    tensor: tf.Tensor, dim: int, line: Communicator, name: str, gradient: str | float = 1.0
) -> tf.Tensor:
    """Concatenates the shards of a line's ranks along `dim`, to a length not known statically."""
    # The gradient: the own shard of the whole one times a factor, or of the ranks' "mean" or "sum".
    if line.world_size == 1:
        return tensor

    def along_front(collective, tensor, name):
        """Ranks gather and scatter along the first axis, so `dim` is moved there."""
        order = list(range(tensor.shape.rank))
        order.insert(0, order.pop(dim))
        front = tensor if order[0] == 0 else tf.transpose(tensor, order)
        result = _in_turn(line, collective, front, name)
        return result if order[0] == 0 else tf.transpose(result, np.argsort(order))

    def back(grad, name):
        grad = tf.convert_to_tensor(grad)  # it is sparse if the tensor was a table
        if isinstance(gradient, str):
            ranks = line.world_size if gradient == "mean" else 1
            return along_front("reduce_scatter", grad / tf.cast(ranks, grad.dtype), name)
        own = own_shard(grad, dim, line, name, scale=gradient)
        return own if gradient == 1.0 else own * tf.cast(gradient, own.dtype)

    whole = _exchanged(tensor, name, functools.partial(along_front, "all_gather"), back)
    shape = whole.shape.as_list()
    shape[dim] = None
    return tf.ensure_shape(whole, shape)


def _exchanged(tensor, name, forward, back):
    """What `forward` makes of a tensor and a name; `back` makes the gradient likewise."""
    name = unique_in_graph(name)

    @tf.custom_gradient
    def run(tensor):
        return forward(tensor, name), lambda grad: back(grad, f"{name}_grad")

    return run(tensor)


def own_shard(
    tensor: tf.Tensor, dim: int, line: Communicator, name: str, *, scale: float = 1.0
) -> tf.Tensor:
    """This rank's shard along `dim` of a whole tensor; its gradient is divided by `scale`."""
    if line.world_size == 1:
        return tensor

    def forward(tensor, name):
        length = tensor.shape[dim]
        length = tf.shape(tensor, tf.int64)[dim] if length is None else length
        start, stop = shard_bounds(length, line.world_size, line.rank)
        return tensor[(slice(None),) * (dim % tensor.shape.rank) + (slice(start, stop),)]

    def back(grad, name):
        whole = gather(grad, dim, line, name, gradient=scale)
        return whole if scale == 1.0 else whole / tf.cast(scale, whole.dtype)

    return _exchanged(tensor, name, forward, back)


def summed(tensor: tf.Tensor, line: Communicator, name: str) -> tf.Tensor:
    """The sum of the ranks' tensors."""
    if line.world_size == 1:
        return tensor
    forward = functools.partial(_in_turn, line, "sum")
    return _exchanged(tensor, name, forward, lambda grad, name: shared(grad, line, name))


def shared(tensor: tf.Tensor, line: Communicator, name: str) -> tf.Tensor:
    """The tensor itself, which each rank of the line uses for its own part of the result."""
    if line.world_size == 1 or not tensor.dtype.is_floating:
        return tensor
    return _exchanged(
        tensor,
        name,
        lambda tensor, _: tf.identity(tensor),
        lambda grad, name: summed(grad, line, name),
    )


def shard_bounds(length: Any, num_shards: int, index: int) -> tuple[Any, Any]:
    """Start and stop of a shard; the first `length % num_shards` have one more."""
    if isinstance(length, int):
        return even_part(length, index, num_shards)
    size, longer = length // num_shards, length % num_shards
    start, stop = (
        i * size + tf.minimum(tf.cast(i, size.dtype), longer) for i in (index, index + 1)
    )
    return start, stop


def split_batch(tensor: Any, num_shards: int, index: int) -> Any:
    """The samples of shard number `index` of a dense, ragged or sparse tensor."""
    start, stop = shard_bounds(num_samples(tensor), num_shards, index)
    if not isinstance(tensor, tf.SparseTensor):
        return tensor[start:stop]
    others = tensor.dense_shape[1:]
    starts = tf.concat([[start], tf.zeros_like(others)], 0)
    return tf.sparse.slice(tensor, starts, tf.concat([[stop - start], others], 0))
