"""Tables in both memories for one test: `_core`, and the same names with tables on a device.

A device's `Core` takes NumPy arrays up and brings results down, so that a test is written once. The
device may be the emulator (cpp/tests/emulator), which is built with the C++ tests and runs the same
kernels on the CPU: it finds wrong results but says nothing about hardware. What devices do not
have, by docs/cuda.md, skips the test that asks for it.
"""

import importlib.machinery
import importlib.util
import os
import sys

import numpy as np
import pytest

from sok_like import _core
from tests.emulated import BUILD

DEVICES = ["emulated", pytest.param("device", marks=pytest.mark.gpu)]


def emulated():
    """The module `_cuda_emulated`, or None where the C++ tests were not built."""
    name = "_cuda_emulated"
    if name in sys.modules:
        return sys.modules[name]
    suffix = importlib.machinery.EXTENSION_SUFFIXES[0]
    path = BUILD / f"{name}{suffix}"
    if not path.exists():
        return None
    spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    sys.modules[name] = module
    return module


def bindings(request):
    """The bindings of device tables that the parameter of a fixture names, one of DEVICES."""
    if request.param == "emulated":
        slow = request.node.get_closest_marker("slow") is not None
        if slow and "slow" not in request.config.option.markexpr:
            pytest.skip("takes minutes under the emulator: pytest -m slow")
        module = emulated()
        if module is None:
            pytest.skip("the emulator comes with the C++ tests (SOK_WITH_TESTS=ON)")
        return module
    if _core.cuda_device_count() == 0:
        # If all tests are skipped, nothing has been shown to work.
        required = os.environ.get("SOK_TEST_GPU") == "required"
        (pytest.fail if required else pytest.skip)(
            "needs a library built with CUDA (make cuda) and a device"
        )
    return _core


def up(cuda, values, dtype=np.int64):
    """An array on the device."""
    return cuda.CudaArray(np.asarray(values, dtype))


class Core:
    """Names that are not defined here are those of `_core`."""

    def __init__(self, cuda):
        self.cuda = cuda

    def __getattr__(self, name):
        return getattr(_core, name)

    def up(self, values, dtype):
        return None if values is None else self.cuda.CudaArray(np.ascontiguousarray(values, dtype))

    def Table(self, name, dim, **options):
        return Table(self, name, dim, **options)

    def apply_gradients(self, table, rule, learning_rate, step, keys, grads, **options):
        arrays = table.up(keys), self.up(grads, np.float32)
        self.cuda.cuda_apply_gradients(table.table, rule, learning_rate, step, *arrays, **options)

    def unique_with_inverse(self, keys, world_size=1):
        arrays = self.cuda.cuda_unique_with_inverse(self.up(keys, keys.dtype), world_size)
        return tuple(array.get() for array in arrays)

    def combine(self, rows, inverse, row_splits, combiner="sum", weights=None):
        arrays = self._samples(inverse, row_splits, combiner, weights)
        return self.cuda.cuda_combine(self.up(rows, np.float32), *arrays).get()

    def combine_gradient(self, grad, inverse, row_splits, num_unique, combiner="sum", weights=None):
        inverse, row_splits, *rest = self._samples(inverse, row_splits, combiner, weights)
        return self.cuda.cuda_combine_gradient(
            self.up(grad, np.float32), inverse, row_splits, num_unique, *rest
        ).get()

    def _samples(self, inverse, row_splits, combiner, weights):
        row_splits = self.up(row_splits, np.int64)
        return self.up(inverse, np.int32), row_splits, combiner, self.up(weights, np.float32)


class Table:
    """`CudaTable` with the arrays of `_core.Table`; other names are those of CudaTable."""

    def __init__(self, core, name, dim, **options):
        self.core = core
        self.key_type = np.dtype(options.get("key_dtype", "int64"))
        self.keeps_flags = bool(options.get("policy"))
        if self.key_type.itemsize < 8:
            pytest.skip("not on a device, by docs/cuda.md")
        self.host = _core.Table(name, dim, **options)  # for initial rows alone
        self.table = core.cuda.CudaTable(name, dim, **options)

    def __getattr__(self, name):
        return getattr(self.table, name)

    def __len__(self):
        return len(self.table)

    def up(self, keys):
        return self.core.up(keys, self.key_type)

    def initial_rows(self, keys):
        return self.host.initial_rows(keys)

    def find(self, keys):
        return tuple(array.get() for array in self.table.find(self.up(keys)))

    def find_or_insert(self, keys):
        """A device flags a new key at any of its positions, unless the table has policies."""
        keys = np.asarray(keys, self.key_type)
        rows, inserted = (array.get() for array in self.table.find_or_insert(self.up(keys)))
        if self.keeps_flags:
            return rows, inserted
        new = keys[inserted]
        assert np.unique(new).size == new.size
        first = np.zeros(keys.size, bool)
        first[np.unique(keys, return_index=True)[1]] = True
        return rows, first & np.isin(keys, new)

    def assign(self, keys, rows):
        self.table.assign(self.up(keys), self.core.up(rows, np.float32))

    def erase(self, keys):
        return self.table.erase(self.up(keys))

    def observe(self, keys):
        self.table.observe(self.up(keys))

    def key_statistics(self, keys):
        return tuple(array.get() for array in self.table.key_statistics(self.up(keys)))

    def assign_scores(self, keys, scores):
        return self.table.assign_scores(self.up(keys), self.core.up(scores, np.int64))
