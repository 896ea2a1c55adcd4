"""Batches in which many threads want one slot, and batches that end within a warp or a block.

Under the emulator with few keys; on a device with as many as it runs at once, again and again: this
is where an order of memory that only hardware has would show.
"""

import concurrent.futures

import numpy as np
import pytest

from sok_like import _core
from tests.memories import up

DIM = 4


def sizes(cuda):
    """Keys per batch, and the number of batches."""
    return (1 << 21, 20) if cuda is _core else (700, 2)


def colliding(count):
    """Keys with one digest and one of four home buckets."""
    wanted = _core._hash_pieces(0)[1:]
    keys = []
    key = 0
    while len(keys) < count:
        bucket, digest = _core._hash_pieces(key)[1:]
        if bucket % 4 == wanted[0] % 4 and digest == wanted[1]:
            keys.append(key)
        key += 1
    return np.array(keys, np.int64)


@pytest.mark.parametrize("num_different", [1, 40, 1000, 0])
def test_each_key_comes_in_once(cuda, num_different):
    batch, times = sizes(cuda)
    rng = np.random.default_rng(num_different)
    universe = rng.integers(-(2**63), 2**63 - 1, num_different) if num_different else colliding(60)
    universe[0] = 0  # the value of a key word that was not written yet
    for _ in range(times):
        table = cuda.CudaTable("t", DIM, initial_capacity=len(universe))
        keys = rng.choice(universe, batch)
        numbers = table.row_numbers(up(cuda, keys), insert=True).get()
        distinct, inverse = np.unique(keys, return_inverse=True)
        assert table.size == len(distinct)
        # One number per key, and one key per number.
        number_of = np.zeros(len(distinct), np.uint32)
        number_of[inverse] = numbers
        np.testing.assert_array_equal(number_of[inverse], numbers)
        assert sorted(number_of) == list(range(len(distinct)))
        rows, inserted = table.find_or_insert(up(cuda, keys))
        assert not inserted.get().any()
        expected = _core.Table("t", DIM).initial_rows(distinct)
        np.testing.assert_array_equal(rows.get(), expected[inverse])


@pytest.mark.parametrize("num_keys", [0, 1, 31, 32, 33, 255, 257])
@pytest.mark.parametrize("dim", [1, 12])
def test_batches_of_any_length(cuda, num_keys, dim):
    keys = np.arange(num_keys) * 7919 - 3
    table = cuda.CudaTable("t", dim)
    rows, inserted = table.find_or_insert(up(cuda, keys))
    expected = _core.Table("t", dim).initial_rows(keys)
    np.testing.assert_array_equal(rows.get(), expected)
    assert inserted.get().all() and table.size == num_keys
    grads = up(cuda, np.ones((num_keys, dim)), np.float32)
    for number, rule in enumerate(("sgd", "rowwise_adagrad")):
        table = cuda.CudaTable("t", dim)
        twice = up(cuda, np.concatenate([keys, keys]))
        both = up(cuda, np.ones((2 * num_keys, dim)), np.float32)
        cuda.cuda_apply_gradients(table, rule, 0.25, 1, up(cuda, keys), grads)
        cuda.cuda_apply_gradients(table, rule, 0.25, 2, twice, both)
        rows, found = table.find(up(cuda, keys))
        assert found.get().all()
        if number == 0:
            np.testing.assert_array_equal(rows.get(), expected - np.float32(0.25) - np.float32(0.5))
    assert table.erase(up(cuda, keys[::2])) == len(keys[::2])
    assert table.size == num_keys - len(keys[::2])


CALLS = {
    "apply": lambda cuda, t, k, n, g: cuda.cuda_apply_gradients(t, "sgd", 0.5, 1, k, g),
    "apply_to_rows": lambda cuda, t, k, n, g: cuda.cuda_apply_gradients_to_rows(
        t, "sgd", 0.5, 1, n, g
    ),
    "group_apply": lambda cuda, t, k, n, g: cuda.cuda_group_apply_gradients(
        [cuda.CudaTable("other", DIM), t], "sgd", 0.5, 1, [k, k], [g, g]
    ),
    "group_lookup": lambda cuda, t, k, n, g: cuda.cuda_group_lookup([t], [k]),
    "combine": lambda cuda, t, k, n, g: cuda.cuda_combine_of_table(
        t, n, up(cuda, [1, 0], np.int32), None, "none"
    ),
    "row_numbers": lambda cuda, t, k, n, g: t.row_numbers(k),
    "gather": lambda cuda, t, k, n, g: t.gather(n),
    "find": lambda cuda, t, k, n, g: t.find(k),
}


@pytest.mark.parametrize("name", CALLS)
def test_a_call_waits_while_a_table_is_held(cuda, name):
    """As by an export that reads part by part; and its thread lets others run meanwhile."""
    if cuda is _core:
        pytest.skip("needs the emulator's way to hold a table")
    table = cuda.CudaTable("t", DIM)
    keys, grads = up(cuda, [5, 6]), up(cuda, np.ones((2, DIM)), np.float32)
    numbers = table.row_numbers(keys, insert=True)
    cuda.hold(table, True)
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        done = pool.submit(CALLS[name], cuda, table, keys, numbers, grads)
        try:
            with pytest.raises(concurrent.futures.TimeoutError):
                done.result(timeout=0.2)
        finally:
            cuda.hold(table, False)
        done.result(timeout=60)


@pytest.mark.gpu
@pytest.mark.parametrize("library", ["torch", "cupy"])
def test_arrays_of_other_libraries(cuda, library):
    module, keys = pytest.importorskip(library), np.arange(100_000)
    table = cuda.CudaTable("t", DIM)
    expected = _core.Table("t", DIM).initial_rows(keys)
    if library == "torch":
        stream = module.cuda.Stream()
        with module.cuda.stream(stream):  # it does not wait for the default stream by itself
            array = module.as_tensor(keys, device="cuda") * 1
            rows, _ = table.find_or_insert(array, stream=stream.cuda_stream)
            shared = module.from_dlpack(rows)
            total = shared.double().sum().item()
        assert shared.device.type == "cuda"
        np.testing.assert_array_equal(shared.cpu().numpy(), expected)
        with pytest.raises(ValueError, match="host memory"):
            table.find(module.as_tensor(keys))
    else:
        array = module.asarray(keys)
        rows, _ = table.find_or_insert(array)
        shared = module.from_dlpack(rows)
        total = float(shared.astype("float64").sum())
        np.testing.assert_array_equal(module.asnumpy(shared), expected)
        np.testing.assert_array_equal(module.asnumpy(module.asarray(rows)), expected)
    assert total == pytest.approx(expected.astype(np.float64).sum(), rel=1e-6)
    del rows
    np.testing.assert_array_equal(table.find(array)[0].get(), expected)
