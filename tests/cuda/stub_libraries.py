"""As much of PyTorch and CuPy as the tests and the benchmark of device tables call, on NumPy.

With these the lines that call the libraries run without a device, so that they are not wrong when
there is one. They show nothing about the libraries.
"""

import contextlib
import types

import numpy as np


class OnDevice:
    """An array that comes in by DLPack."""

    def __init__(self, array):
        self.__dlpack__ = array.__dlpack__
        self.__dlpack_device__ = array.__dlpack_device__

    def __mul__(self, _):
        return self


class Shared:
    """An array that went out: NumPy's, with the names that the two libraries have for it."""

    device = types.SimpleNamespace(type="cuda")

    def __init__(self, values):
        self.values = values

    def double(self):
        return self.values.astype(np.float64)

    def astype(self, dtype):
        return self.values.astype(dtype)

    def cpu(self):
        return self

    def numpy(self):
        return self.values


def torch(cuda):
    return types.SimpleNamespace(
        cuda=types.SimpleNamespace(
            Stream=lambda: types.SimpleNamespace(cuda_stream=16),  # no address that is followed
            stream=lambda stream: contextlib.nullcontext(),
        ),
        as_tensor=lambda keys, device=None: OnDevice(cuda.CudaArray(keys)) if device else keys,
        from_dlpack=lambda rows: Shared(rows.get()),
    )


def cupy(cuda):
    return types.SimpleNamespace(
        asarray=lambda keys: (
            OnDevice(cuda.CudaArray(keys)) if isinstance(keys, np.ndarray) else Shared(keys.get())
        ),
        from_dlpack=lambda rows: Shared(rows.get()),
        asnumpy=lambda shared: shared.values,
    )


def torch_with_embeddings():
    """For the benchmark; the calls are counted in `calls`."""
    calls = []
    event = types.SimpleNamespace(record=lambda: None, elapsed_time=lambda end: 1.0)

    def embedding(indices, table):
        calls.append("embedding")
        return table[indices]

    def embedding_bag(indices, table, offsets, mode):
        calls.append(f"embedding_bag {mode}")
        return np.add.reduceat(table[indices], offsets)

    return types.SimpleNamespace(
        calls=calls,
        rand=lambda shape, device: np.zeros(shape),
        randint=lambda low, high, shape, device: np.full(shape, high - 1),
        arange=lambda count, device: np.arange(count),
        nn=types.SimpleNamespace(
            functional=types.SimpleNamespace(embedding=embedding, embedding_bag=embedding_bag)
        ),
        cuda=types.SimpleNamespace(Event=lambda enable_timing: event, synchronize=lambda: None),
    )
