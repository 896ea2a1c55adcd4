"""`CudaTable` with the NumPy interface of `_core.Table`, so that one test serves both."""

import numpy as np

from tests.core.test_policies import DIM, INITIAL


class DeviceTable:
    """Takes and gives NumPy arrays; what is not named here is the CudaTable's."""

    def __init__(self, cuda, capacity=0, policy=None, dim=DIM, initial=INITIAL, **kwargs):
        self.cuda = cuda
        self.table = cuda.CudaTable(
            "t",
            dim,
            initializer="default_rows",
            default_rows=initial,
            max_capacity=capacity,
            policy=policy or {},
            **kwargs,
        )

    def __getattr__(self, name):
        return getattr(self.table, name)

    def up(self, values, dtype=np.int64):
        return self.cuda.CudaArray(np.ascontiguousarray(values, dtype))

    def find(self, keys):
        return tuple(array.get() for array in self.table.find(self.up(keys)))

    def find_or_insert(self, keys):
        return tuple(array.get() for array in self.table.find_or_insert(self.up(keys)))

    def assign(self, keys, rows):
        self.table.assign(self.up(keys), self.up(rows, np.float32))

    def erase(self, keys):
        return self.table.erase(self.up(keys))

    def observe(self, keys):
        self.table.observe(self.up(keys))

    def key_statistics(self, keys):
        return tuple(array.get() for array in self.table.key_statistics(self.up(keys)))

    def assign_scores(self, keys, scores):
        return self.table.assign_scores(self.up(keys), self.up(scores))

    def apply_gradients(self, rule, learning_rate, step, keys, grads, **options):
        self.cuda.cuda_apply_gradients(
            self.table,
            rule,
            learning_rate,
            step,
            self.up(keys),
            self.up(grads, np.float32),
            **options,
        )
