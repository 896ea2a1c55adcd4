"""`CudaTable` with the arguments that the tests of policies give to `_core.Table`."""

from tests.core.test_policies import DIM, INITIAL
from tests.cuda.core_on_device import Core, Table


class DeviceTable(Table):
    def __init__(self, cuda, capacity=0, policy=None, dim=DIM, initial=INITIAL, **kwargs):
        super().__init__(
            Core(cuda),
            "t",
            dim,
            initializer="default_rows",
            default_rows=initial,
            max_capacity=capacity,
            policy=policy or {},
            **kwargs,
        )

    def find_or_insert(self, keys):
        """With the flags as they are: a table with policies sets them as the CPU does."""
        return tuple(array.get() for array in self.table.find_or_insert(self.up(keys)))

    def apply_gradients(self, rule, learning_rate, step, keys, grads, **options):
        self.core.apply_gradients(self, rule, learning_rate, step, keys, grads, **options)
