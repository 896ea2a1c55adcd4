"""What only `CudaTable` has: row numbers, sums straight from a table, arguments on a device.

What it has in common with `_core.Table` is in tests/core, and its bits are compared with those of
the CPU in cpp/tests/cuda.
"""

import numpy as np
import pytest

from sok_like import _core
from tests import memories
from tests.core.test_policies import INITIAL, make
from tests.core.test_policy_details import large_run
from tests.memories import up

DIM = 4
EXTREMES = [0, 1, -1, -2, 2**63 - 1, -(2**63), 2**32, 2**31, -(2**31), 255, 256]


# ---- rows by number ----


def test_rows_by_number(cuda):
    table = cuda.CudaTable("t", DIM)
    keys = up(cuda, EXTREMES)
    assert (table.row_numbers(keys).get() == 2**32 - 1).all()
    numbers = table.row_numbers(keys, insert=True)
    assert sorted(numbers.get().tolist()) == list(range(len(EXTREMES)))
    np.testing.assert_array_equal(table.gather(numbers).get(), table.find(keys)[0].get())


def test_row_numbers_of_keys_that_wait(cuda):
    core = memories.Core(cuda)
    table = make(core, 0, {"filter_freq": 2, "no_permission": -2.5})
    table.observe([1, 2])
    table.observe([1])
    rows = table.gather(table.row_numbers(table.up([1, 2, 1]))).get()
    assert rows.tolist() == [INITIAL[1].tolist(), [-2.5, -2.5], INITIAL[1].tolist()]
    table.row_numbers(table.up([2, 3]), insert=True)  # written, not looked up
    assert table.statistics()["written"] == 2
    assert table.statistics()["waiting"] == 0


def test_a_step_by_row_number(cuda):
    table = cuda.CudaTable("t", DIM, initializer="constant", a=1.0)
    keys = up(cuda, [3, -1, 7])
    numbers = table.row_numbers(keys, insert=True)
    grads = np.arange(12, dtype=np.float32).reshape(3, DIM)
    cuda.cuda_apply_gradients_to_rows(table, "sgd", 0.5, 1, numbers, up(cuda, grads, np.float32))
    np.testing.assert_array_equal(table.find(keys)[0].get(), 1.0 - 0.5 * grads)


# ---- sums straight from a table ----


def test_combine_of_a_table_whose_rows_owe_steps(cuda):
    table, keys = cuda.CudaTable("t", DIM, a=-0.5, b=0.5), up(cuda, np.arange(9))
    for step in range(1, 6):  # the other rows fall behind
        batch = up(cuda, np.arange(9 if step == 1 else 2))
        grads = up(cuda, np.ones((len(batch.get()), DIM)), np.float32)
        cuda.cuda_apply_gradients(table, "adam", 0.1, step, batch, grads)
    numbers = table.row_numbers(keys, insert=True)
    inverse, splits = up(cuda, [5, 6, 7, 8], np.int32), up(cuda, [0, 1, 4])
    out = cuda.cuda_combine_of_table(table, numbers, inverse, splits, "sum").get()
    rows = table.find(keys)[0].get()  # brought up
    np.testing.assert_allclose(out, [rows[5], rows[6:9].sum(0)], rtol=1e-6)


def test_combine_of_a_table_is_in_the_order_of_its_stream(cuda):
    """Runs after the last call on the table, and before the next one."""
    if cuda is _core:
        pytest.skip("needs the emulator's count of streams that wait")
    table = cuda.CudaTable("t", DIM)
    numbers = table.row_numbers(up(cuda, [1, 2]), insert=True).get()
    other = 16  # the address of a stream, which the emulator does not look at
    parts = (numbers, np.arange(2, dtype=np.int32), np.array([0, 2]))
    arrays = [cuda.CudaArray(part, stream=other) for part in parts]
    more_keys = up(cuda, [3])
    before = cuda.num_stream_waits()
    cuda.cuda_combine_of_table(table, *arrays, "sum", stream=other)
    assert cuda.num_stream_waits() == before + 1
    table.row_numbers(more_keys, insert=True)
    assert cuda.num_stream_waits() == before + 2


def test_combine_of_a_table_with_keys_that_wait(cuda):
    table = cuda.CudaTable("t", DIM, policy={"filter_freq": 3, "no_permission": -2.0})
    table.assign(up(cuda, [5]), up(cuda, np.full((1, DIM), 3.0), np.float32))
    numbers = table.row_numbers(up(cuda, [5, 6]))
    inverse, splits = up(cuda, [0, 1, 1], np.int32), up(cuda, [0, 1, 3])
    out = cuda.cuda_combine_of_table(table, numbers, inverse, splits, "sum").get()
    np.testing.assert_array_equal(out, [[3.0] * DIM, [-4.0] * DIM])


# ---- many tables in one launch ----

# Rows and steps beside those of tables on the CPU are in cpp/tests/cuda/jobs_test.cc.


def test_rows_are_written_where_asked_and_trained(cuda):
    tables = [cuda.CudaTable("a", 4), cuda.CudaTable("b", 8)]
    keys = [up(cuda, range(5)), up(cuda, range(3))]
    rows = [up(cuda, np.zeros(shape), np.float32) for shape in ((5, 4), (3, 8))]
    assert cuda.cuda_group_lookup(tables, keys, rows) == rows
    for table, key, row in zip(tables, keys, rows, strict=True):
        np.testing.assert_array_equal(row.get(), table.find(key)[0].get())
        assert row.get().any()
    cuda.cuda_group_apply_gradients(tables, "sgd", 0.5, 1, keys, rows)
    for found, row in zip(cuda.cuda_group_lookup(tables, keys), rows, strict=True):
        np.testing.assert_array_equal(found.get(), row.get() / 2)


def test_a_table_with_policies_among_others(cuda):
    plain = cuda.CudaTable("plain", 2)
    policy = {"filter_freq": 2, "no_permission": 7.0}
    filtered = cuda.CudaTable("filtered", 2, policy=policy)
    keys = [up(cuda, [1, 2]), up(cuda, [1, 2])]
    first = cuda.cuda_group_lookup([plain, filtered], keys)
    assert (first[1].get() == 7).all() and not (first[0].get() == 7).any()
    second = cuda.cuda_group_lookup([plain, filtered], keys)
    assert not (second[1].get() == 7).any()


def test_groups_that_cannot_be(cuda):
    a, b = cuda.CudaTable("a", 4), cuda.CudaTable("b", 8)
    key, grad = up(cuda, range(3)), up(cuda, np.ones((3, 4)), np.float32)
    with pytest.raises(ValueError, match="`keys` must have an array for each of 2 tables"):
        cuda.cuda_group_lookup([a, b], [key])
    with pytest.raises(TypeError, match="Received: None"):
        cuda.cuda_group_lookup([a, None], [key, key])
    with pytest.raises(ValueError, match="rows"):
        cuda.cuda_group_lookup([a, b], [key, key], [grad, grad])
    with pytest.raises(ValueError, match=r"Received: table 'a' twice"):
        cuda.cuda_group_apply_gradients([a, a], "sgd", 0.1, 1, [key, key], [grad, grad])
    full = cuda.CudaTable("full", 4, max_capacity=2)
    with pytest.raises(Exception, match=r"max_capacity=2. Received: 3 new keys .*'full'"):
        cuda.cuda_group_apply_gradients([a, full], "sgd", 0.1, 1, [key, key], [grad, grad])
    assert a.size == full.size == 0


# ---- large batches ----


@pytest.mark.parametrize(
    "capacity, policy",
    [
        (500, {"filter_freq": 2, "score": "lfu", "steps_to_live": 9, "evicted_buffer": 200}),
        (700, {"score": "lru", "filter_freq": 2, "bloom_max_keys": 3000, "bloom_counter_bits": 8}),
    ],
)
def test_large_lookups_are_those_of_the_cpu(cuda, capacity, policy):
    tables = [make(core, capacity, policy) for core in (memories.Core(cuda), _core)]
    for got, want in zip(*(large_run(table, 6000, 900, 10) for table in tables), strict=True):
        np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize(
    "num_keys, batch",
    [(3000, 1024), pytest.param(100_000_000, 1 << 22, marks=[pytest.mark.gpu, pytest.mark.slow])],
)
def test_so_many_keys(cuda, num_keys, batch):
    if cuda is not _core and num_keys > 1_000_000:
        pytest.skip("needs a device")
    table = cuda.CudaTable("t", DIM, initial_capacity=num_keys)
    for begin in range(0, num_keys, batch):
        keys = np.arange(begin, min(begin + batch, num_keys), dtype=np.int64) * 7919
        table.row_numbers(up(cuda, keys), insert=True)
    assert len(table) == num_keys
    keys = np.random.default_rng(0).integers(0, num_keys, batch) * 7919
    rows, found = table.find(up(cuda, keys))
    assert found.get().all()
    expected = _core.Table("t", DIM).initial_rows(keys[:1000])
    np.testing.assert_array_equal(rows.get()[:1000], expected)


# ---- arguments ----


def test_32_bit_keys_are_refused(cuda):
    with pytest.raises(ValueError, match="`key_dtype` must be int64 or uint64.*int32"):
        cuda.CudaTable("t", DIM, key_dtype="int32")


def test_a_build_without_cuda_has_the_names_and_says_so(cuda):
    """The two modules of bindings must not drift apart."""
    if isinstance(_core.CudaTable, type):
        pytest.skip("this library was built with CUDA")
    names = [name for name in dir(cuda) if name.startswith(("Cuda", "cuda_"))]
    assert len(names) == 17
    for name in set(names) - {"CudaError", "cuda_device_count"}:
        with pytest.raises(RuntimeError, match="make cuda"):
            getattr(_core, name)("t", DIM)
    assert _core.cuda_device_count() == 0
