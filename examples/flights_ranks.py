"""What the flights examples use of other ranks: numbers, joining, broadcasting."""

import os

import numpy as np
import tensorflow as tf


class Ranks:
    """This process among the launched ones; without a launcher, one rank without Horovod.

    Attributes:
        rank: number of this process, 0 to `size - 1`.
        size: number of processes.
    """

    def __init__(self):
        launched = os.environ.get("OMPI_COMM_WORLD_SIZE") or os.environ.get("HOROVOD_SIZE") or "1"
        self._hvd = None
        self.rank, self.size = 0, 1
        if int(launched) > 1:
            import horovod.tensorflow as hvd

            hvd.init()
            self._hvd = hvd
            self.rank, self.size = hvd.rank(), hvd.size()

    def mean_op(self, tensor):
        """Averages a tensor over the ranks; also inside a graph."""
        return tensor if self.size == 1 else self._hvd.allreduce(tensor, op=self._hvd.Average)

    def broadcast_op(self, tensor):
        """Gives every rank the tensor of rank 0; also inside a graph."""
        return tensor if self.size == 1 else self._hvd.broadcast(tensor, root_rank=0)

    def broadcast_variables(self, variables):
        """Overwrites `variables` on every rank with the values of rank 0, eagerly."""
        for variable in variables:
            variable.assign(self.broadcast_op(tf.convert_to_tensor(variable)))

    def sum(self, number):
        """Sums a Python integer over the ranks."""
        if self.size == 1:
            return int(number)
        return int(self._hvd.allreduce(tf.constant(int(number), tf.int64), op=self._hvd.Sum))

    def shard(self, num_rows, local_batch):
        """This rank's batches of `num_rows` rows, the same number of full batches on every rank.

        A lookup is a collective, so all ranks must make the same number of them. Rows are dealt out
        in turn. The last batches continue with the first rows again, which `join` drops.

        Returns:
            int64 `[batches, local_batch]` of row numbers.
        """
        batches = -(-num_rows // (local_batch * self.size))
        rows = np.arange(batches * local_batch) * self.size + self.rank
        return (rows % num_rows).reshape(batches, local_batch)

    def join(self, values, num_rows):
        """Puts the results of all ranks for their `shard` back into the order of the rows.

        Args:
            values: float32 `[batches * local_batch]`, this rank's results.
            num_rows: as given to `shard`.

        Returns:
            float32 `[num_rows]`, on every rank.
        """
        if self.size > 1:
            values = self._hvd.allgather(tf.constant(values)).numpy()
        return values.reshape(self.size, -1).T.ravel()[:num_rows]
