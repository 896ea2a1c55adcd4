"""What the flights examples use of other ranks: numbers, joining, broadcasting."""

import numpy as np
import tensorflow as tf

from sok_like.runtime.ranks import comm


class Ranks:
    """This process among the launched ones, after `sok.Init`.

    Attributes:
        rank: number of this process, 0 to `size - 1`.
        size: number of processes.
    """

    def __init__(self):
        self._communicator = comm.current()
        self.rank, self.size = self._communicator.rank, self._communicator.world_size

    def mean_op(self, tensor):
        """Averages a tensor over the ranks; also inside a graph."""
        return self._communicator.average([tensor], "flights_mean")[0]

    def broadcast_op(self, tensor):
        """Gives every rank the tensor of rank 0; also inside a graph."""
        return self._communicator.broadcast(tf.convert_to_tensor(tensor), 0, "flights_start")

    def broadcast_variables(self, variables):
        """Overwrites `variables` on every rank with the values of rank 0, eagerly."""
        for variable in variables:
            variable.assign(self.broadcast_op(variable))

    def sum(self, number):
        """Sums a Python integer over the ranks."""
        return int(self._communicator.sum(tf.constant(int(number), tf.int64), "flights_sum"))

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
        values = self._communicator.all_gather(tf.constant(values), "flights_join").numpy()
        return values.reshape(self.size, -1).T.ravel()[:num_rows]
