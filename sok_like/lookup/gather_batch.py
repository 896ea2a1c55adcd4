"""`sok.gather_batch`: the rows of all ranks' batches, for losses over the global batch.

rank 0: [a, b]    rank 1: [c]    =gather=>    both: [a, b, c]
gradients of [a, b, c] on rank 0 and rank 1   =sum=>   [a, b] to rank 0, [c] to rank 1
"""

from typing import Any

import tensorflow as tf

from sok_like.lookup.local_variables import unique_in_graph
from sok_like.runtime.framework import graphs
from sok_like.runtime.ranks import comm, exchange_order
from sok_like.runtime.ranks.initialize import ensure_initialized


def gather_batch(tensor: Any, name: str = "gather_batch") -> tf.Tensor:
    """The ranks' tensors joined along their first axis, in rank order; every rank must call it.

    For losses that compare a sample with those of other ranks, such as in-batch negatives. The
    gradient of a row is the sum of its gradients in all ranks' losses. So each rank takes the loss
    of its own samples against all rows. The mean of these losses over ranks has the gradient of one
    process with the global batch, as everywhere else in `fit`.

    Args:
        tensor: Numbers `[batch, ...]`; the batch may differ between ranks, other axes may not.
        name: Name of the collective, the same on all ranks.

    Returns:
        The same dtype, `[sum of batches, ...]`. On one rank it is `tensor`.

    Raises:
        ValueError: `tensor` is a scalar.
        TypeError: it does not hold numbers.
    """
    tensor = tf.convert_to_tensor(tensor)
    if tensor.shape.rank == 0:
        raise ValueError(f"`tensor` must be of shape [batch, ...]. Received: the scalar {tensor!r}")
    if not (tensor.dtype.is_floating or tensor.dtype.is_integer):
        raise TypeError(f"`tensor` must hold numbers. Received: {tensor.dtype.name}")
    ensure_initialized()
    communicator = comm.current()
    if communicator.world_size == 1:
        return tensor
    name = unique_in_graph(name)

    def gather():
        size = tf.shape(tensor, tf.int64)[:1]
        sizes = communicator.all_gather(size, f"{name}_sizes")
        return communicator.all_gather(tensor, name), sizes

    @tf.custom_gradient
    def run(tensor):
        gathered, sizes = exchange_order.exchange_in_turn(gather, name, communicator)
        gathered.set_shape([None, *tensor.shape[1:]])

        def back(grad):
            @tf.custom_gradient
            def send_back(grad):
                turn = f"{name}_grad"
                total = exchange_order.collective_in_turn(communicator, "sum", grad, turn)
                start = tf.reduce_sum(sizes[: communicator.rank])
                of_this_rank = total[start : start + sizes[communicator.rank]]
                return of_this_rank, lambda second: graphs.refuse_second_order([second], [grad])[0]

            return tf.ensure_shape(send_back(tf.convert_to_tensor(grad)), tensor.shape)

        return gathered, back

    return run(tensor)
