"""DLPack in both directions, read and written by the structs of its specification in ctypes."""

import ctypes
import gc
import types

import numpy as np
import pytest

from tests.memories import up

CUDA, HOST = 2, 1
INT, UINT, FLOAT, BOOL = 0, 1, 2, 6


class Tensor(ctypes.Structure):
    _fields_ = [
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    ]


class ManagedTensor(ctypes.Structure):
    pass


Deleter = ctypes.CFUNCTYPE(None, ctypes.POINTER(ManagedTensor))
ManagedTensor._fields_ = [("tensor", Tensor), ("context", ctypes.c_void_p), ("deleter", Deleter)]

api = ctypes.pythonapi
api.PyCapsule_New.restype = ctypes.py_object
api.PyCapsule_New.argtypes = [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]
api.PyCapsule_GetPointer.restype = ctypes.c_void_p
api.PyCapsule_GetPointer.argtypes = [ctypes.py_object, ctypes.c_char_p]
api.PyCapsule_SetName.argtypes = [ctypes.py_object, ctypes.c_char_p]
api.PyCapsule_GetName.restype = ctypes.c_char_p
api.PyCapsule_GetName.argtypes = [ctypes.py_object]


def tensor_of(capsule, name=b"dltensor"):
    pointer = api.PyCapsule_GetPointer(capsule, name)
    return ctypes.cast(pointer, ctypes.POINTER(ManagedTensor)).contents


class Producer:
    """Another library's array, over the memory of a CudaArray."""

    def __init__(self, array, code, bits, **changes):
        self.array = array
        self.deleted = 0
        self.streams = []
        self.capsules = []
        shape = changes.pop("shape", array.shape)
        strides = changes.pop("strides", None)
        self._shape = (ctypes.c_int64 * len(shape))(*shape)
        self._strides = strides and (ctypes.c_int64 * len(strides))(*strides)
        data = array.__cuda_array_interface__["data"][0]
        fields = {"device_type": CUDA, "device_id": 0, "lanes": 1, "byte_offset": 0, **changes}
        self.device = (fields["device_type"], fields["device_id"])
        tensor = Tensor(
            data=data, ndim=len(shape), code=code, bits=bits, shape=self._shape, **fields
        )
        if strides:
            tensor.strides = self._strides
        self._managed = ManagedTensor(tensor, None, Deleter(self._delete))

    def _delete(self, managed):
        assert ctypes.addressof(managed.contents) == ctypes.addressof(self._managed)
        self.deleted += 1

    def __dlpack_device__(self):
        return self.device

    def __dlpack__(self, *, stream=None):
        self.streams.append(stream)
        capsule = api.PyCapsule_New(ctypes.addressof(self._managed), b"dltensor", None)
        self.capsules.append(capsule)
        return capsule


KEYS = np.array([5, 1, 5, 9, -1], np.int64)


def test_arrays_of_others_come_in(cuda):
    table = cuda.CudaTable("t", 4)
    keys = Producer(up(cuda, KEYS), INT, 64)
    rows = np.arange(20, dtype=np.float32).reshape(5, 4)
    array = Producer(up(cuda, rows, np.float32), FLOAT, 32)
    table.assign(keys, array)
    out = Producer(up(cuda, np.zeros((5, 4)), np.float32), FLOAT, 32, strides=(4, 1))
    found = Producer(up(cuda, np.zeros(5), np.bool_), BOOL, 8)
    assert table.find(keys, rows=out, found=found)[0] is out
    np.testing.assert_array_equal(out.array.get(), rows[[2, 1, 2, 3, 4]])
    assert found.array.get().all()
    for producer, times in ((keys, 2), (array, 1), (out, 1), (found, 1)):
        assert producer.deleted == times  # as often as it was asked, and once each
        assert producer.streams == [1] * times  # 0 would be no stream
        names = [api.PyCapsule_GetName(capsule) for capsule in producer.capsules]
        assert names == [b"used_dltensor"] * times
        producer.capsules.clear()
        assert producer.deleted == times


def test_an_offset_and_lengths_of_one_are_contiguous(cuda):
    table = cuda.CudaTable("t", 1)
    keys = Producer(up(cuda, KEYS), INT, 64, shape=(2,), byte_offset=24)
    rows, inserted = table.find_or_insert(keys)
    assert inserted.get().all() and len(table) == 2
    assert table.find(up(cuda, [9, -1]))[1].get().all()
    out = Producer(up(cuda, np.ones(2), np.float32), FLOAT, 32, shape=(2, 1), strides=(1, 77))
    table.find(keys, rows=out)
    np.testing.assert_array_equal(out.array.get(), rows.get()[:, 0])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"device_type": HOST}, "`keys` must be an array in device memory.*host memory"),
        ({"device_type": 10}, "`keys`.*DLPack's type 10"),
        ({"device_id": 3}, "`keys` must be on the current CUDA device, 0.*device 3"),
        ({"bits": 32}, "`keys` must have the type <i8. Received: <i4"),
        ({"code": FLOAT}, "`keys` must have the type <i8. Received: <f8"),
        ({"code": 4, "bits": 16}, r"`keys` must have the type <i8. Received: DLPack type \(4, 16"),
        ({"lanes": 2}, "`keys` must have the type <i8"),
        ({"shape": (5, 1)}, r"`keys` must have shape \[\?\]. Received: \[5, 1\]"),
        ({"shape": (2,), "strides": (2,)}, "`keys` must be contiguous"),
    ],
)
def test_what_does_not_fit_is_refused_and_given_back(cuda, changes, message):
    changes = {"code": INT, "bits": 64, **changes}
    producer = Producer(up(cuda, KEYS), changes.pop("code"), changes.pop("bits"), **changes)
    with pytest.raises(ValueError, match=message):
        cuda.CudaTable("t", 4).find(producer)
    assert producer.deleted == len(producer.streams)


def test_host_arrays_are_refused(cuda):
    with pytest.raises(ValueError, match=r"`keys`.*device memory.*numpy.ndarray.*host memory"):
        cuda.CudaTable("t", 4).find(KEYS)
    with pytest.raises(ValueError, match=r"`keys`.*__dlpack__.*Received: .*list"):
        cuda.CudaTable("t", 4).find([1, 2])


def test_a_used_capsule_is_refused(cuda):
    producer = Producer(up(cuda, KEYS), INT, 64)
    table = cuda.CudaTable("t", 4)
    capsule = producer.__dlpack__()
    api.PyCapsule_SetName(capsule, b"used_dltensor")
    producer.__dlpack__ = lambda stream: capsule
    with pytest.raises(ValueError, match=r"`keys`.*'dltensor'.*used_dltensor"):
        table.find(producer)
    assert producer.deleted == 0


@pytest.mark.parametrize(
    ("dtype", "code", "bits"),
    [
        (np.int64, INT, 64),
        (np.uint64, UINT, 64),
        (np.int32, INT, 32),
        (np.float32, FLOAT, 32),
        (np.bool_, BOOL, 8),
    ],
)
def test_arrays_go_out(cuda, dtype, code, bits):
    values = np.arange(6).reshape(2, 3).astype(dtype)
    array = up(cuda, values, dtype)
    assert array.__dlpack_device__() == (CUDA, 0)
    capsule = array.__dlpack__()
    tensor = tensor_of(capsule).tensor
    assert (tensor.code, tensor.bits, tensor.lanes) == (code, bits, 1)
    assert (tensor.device_type, tensor.device_id, tensor.byte_offset) == (CUDA, 0, 0)
    assert tensor.shape[: tensor.ndim] == [2, 3] and tensor.strides[:2] == [3, 1]
    assert tensor.data == array.__cuda_array_interface__["data"][0]


def test_the_memory_lives_as_long_as_one_owner(cuda):
    if cuda.__name__ != "_cuda_emulated":
        pytest.skip("counts what the emulator has allocated")
    gc.collect()  # of other tests
    before = cuda.bytes_allocated()
    array = up(cuda, [7, 8, 9])
    capsule = array.__dlpack__(stream=-1)
    unused = array.__dlpack__(stream=1)
    managed = tensor_of(capsule)
    api.PyCapsule_SetName(capsule, b"used_dltensor")  # as a consumer does
    del array, capsule
    assert cuda.read_int64(managed.tensor.data, 3) == [7, 8, 9]
    managed.deleter(ctypes.pointer(managed))
    assert cuda.bytes_allocated() == before + 24  # the other capsule's
    del unused, managed
    assert cuda.bytes_allocated() == before


def test_the_memory_is_freed_behind_the_work_of_its_consumer(cuda):
    """The consumer gives it back while its stream is still to read it, as PyTorch does."""
    if cuda.__name__ != "_cuda_emulated":
        pytest.skip("needs streams that run late")
    streams = 0, 32  # producer's, consumer's; the emulator does not look at the addresses
    for _ in range(20):
        array = cuda.CudaArray(np.array([7, 8, 9], np.float32), stream=streams[0])
        capsule = array.__dlpack__(stream=streams[1])
        managed = tensor_of(capsule)
        api.PyCapsule_SetName(capsule, b"used_dltensor")
        shared = Producer(array, FLOAT, 32)
        target = cuda.CudaArray(np.zeros(3, np.float32), stream=streams[1])
        cuda.cuda_copy(target, shared, stream=streams[1])
        waits = cuda.num_stream_waits()
        del array, shared, capsule
        managed.deleter(ctypes.pointer(managed))
        assert cuda.num_stream_waits() == waits + 1
        other = cuda.CudaArray(np.ones(3, np.float32), stream=streams[0])
        np.testing.assert_array_equal(target.get(), [7, 8, 9])
        del other


def test_a_round_trip_shares_the_memory(cuda):
    array = up(cuda, np.zeros(3), np.float32)
    wrapped = types.SimpleNamespace(
        __dlpack__=array.__dlpack__, __dlpack_device__=array.__dlpack_device__
    )
    cuda.cuda_copy(wrapped, up(cuda, [1, 2, 3], np.float32))
    np.testing.assert_array_equal(array.get(), [1, 2, 3])


def test_arguments_of_dlpack_are_checked(cuda):
    array = up(cuda, [1])
    array.__dlpack__(stream=None, max_version=(1, 0), dl_device=(CUDA, 0), copy=False)
    for stream in (0, -2):
        with pytest.raises(ValueError, match="`stream`"):
            array.__dlpack__(stream=stream)
    with pytest.raises(BufferError, match="own device"):
        array.__dlpack__(dl_device=(HOST, 0))
    with pytest.raises(BufferError, match="copy"):
        array.__dlpack__(copy=True)
