"""Many tables in one launch, through the bindings.

Rows and steps beside those of tables on the CPU are in cpp/tests/cuda/jobs_test.cc.
"""

import numpy as np
import pytest


def up(cuda, arrays):
    return [cuda.CudaArray(np.ascontiguousarray(array)) for array in arrays]


def make(cuda, dims):
    return [cuda.CudaTable(f"t{i}", dim) for i, dim in enumerate(dims)]


def test_rows_are_written_where_asked_and_trained(cuda):
    tables = make(cuda, [4, 8])
    keys = up(cuda, [np.arange(5), np.arange(3)])
    rows = up(cuda, [np.zeros((5, 4), np.float32), np.zeros((3, 8), np.float32)])
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
    keys = up(cuda, [np.array([1, 2]), np.array([1, 2])])
    first = cuda.cuda_group_lookup([plain, filtered], keys)
    assert (first[1].get() == 7).all() and not (first[0].get() == 7).any()
    second = cuda.cuda_group_lookup([plain, filtered], keys)
    assert not (second[1].get() == 7).any()


def test_what_cannot_be(cuda):
    a, b = make(cuda, [4, 8])
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
