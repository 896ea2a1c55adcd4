"""Many tables in one launch, through the bindings: the rows of tables on the CPU."""

import numpy as np
import pytest

from sok_like import _core

DIMS = [4, 3, 16, 8, 5] * 8  # more tables than a launch holds


def up(cuda, arrays):
    return [cuda.CudaArray(np.ascontiguousarray(array)) for array in arrays]


def twins(cuda, dims=DIMS):
    make = [(f"t{i}", dim) for i, dim in enumerate(dims)]
    return [_core.Table(*args) for args in make], [cuda.CudaTable(*args) for args in make]


def random_keys(rng, dims=DIMS):
    return [rng.integers(-50, 50, rng.choice([0, 1, 40, 300])) for _ in dims]


@pytest.mark.parametrize("rule, unique", [("adam", False), ("rowwise_adagrad", True)])
def test_lookups_and_steps_of_many_tables(cuda, rule, unique):
    rng = np.random.default_rng(1)
    on_cpu, on_device = twins(cuda)
    for step in range(1, 4):
        keys = random_keys(rng)
        if unique:
            keys = [np.unique(k) for k in keys]
        grads = [
            rng.standard_normal((len(k), d)).astype(np.float32)
            for k, d in zip(keys, DIMS, strict=True)
        ]
        expected = [t.find_or_insert(k)[0] for t, k in zip(on_cpu, keys, strict=True)]
        rows = cuda.cuda_group_lookup(on_device, up(cuda, keys))
        for got, wanted in zip(rows, expected, strict=True):
            np.testing.assert_allclose(got.get(), wanted, atol=1e-6)
        cuda.cuda_group_apply_gradients(
            on_device, rule, 0.1, step, up(cuda, keys), up(cuda, grads), keys_are_unique=unique
        )
        for table, k, g in zip(on_cpu, keys, grads, strict=True):
            _core.apply_gradients(table, rule, 0.1, step, k, g)
    everything = np.arange(-60, 60)
    found = cuda.cuda_group_lookup(on_device, up(cuda, [everything] * len(DIMS)), insert=False)
    for got, cpu, device in zip(found, on_cpu, on_device, strict=True):
        np.testing.assert_allclose(got.get(), cpu.find(everything)[0], atol=1e-6)
        assert device.size == cpu.size


def test_rows_are_written_where_asked(cuda):
    _, tables = twins(cuda, [4, 8])
    keys = up(cuda, [np.arange(5), np.arange(3)])
    rows = up(cuda, [np.zeros((5, 4), np.float32), np.zeros((3, 8), np.float32)])
    assert cuda.cuda_group_lookup(tables, keys, rows) == rows
    for table, key, row in zip(tables, keys, rows, strict=True):
        np.testing.assert_array_equal(row.get(), table.find(key)[0].get())
        assert row.get().any()


def test_a_table_with_policies_among_others(cuda):
    plain = cuda.CudaTable("plain", 2)
    policy = {"filter_freq": 2, "no_permission": 7.0}
    filtered = cuda.CudaTable("filtered", 2, policy=policy)
    keys = up(cuda, [np.array([1, 2]), np.array([1, 2])])
    first = cuda.cuda_group_lookup([plain, filtered], keys)
    assert (first[1].get() == 7).all() and not (first[0].get() == 7).any()
    second = cuda.cuda_group_lookup([plain, filtered], keys)
    assert not (second[1].get() == 7).any()


def test_what_cannot_be(cuda):
    _, (a, b) = twins(cuda, [4, 8])
    key = cuda.CudaArray(np.arange(3))
    grad = cuda.CudaArray(np.ones((3, 4), np.float32))
    with pytest.raises(ValueError, match="`keys` must have an array for each of 2 tables"):
        cuda.cuda_group_lookup([a, b], [key])
    with pytest.raises(TypeError, match="Received: None"):
        cuda.cuda_group_lookup([a, None], [key, key])
    with pytest.raises(ValueError, match="rows"):
        cuda.cuda_group_lookup([a, b], [key, key], [grad, grad])
    with pytest.raises(ValueError, match=r"Received: table 't0' twice"):
        cuda.cuda_group_apply_gradients([a, a], "sgd", 0.1, 1, [key, key], [grad, grad])
    full = cuda.CudaTable("full", 4, max_capacity=2)
    with pytest.raises(Exception, match=r"max_capacity=2. Received: 3 new keys .*'full'"):
        cuda.cuda_group_apply_gradients([a, full], "sgd", 0.1, 1, [key, key], [grad, grad])
    assert a.size == full.size == 0
