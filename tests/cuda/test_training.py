"""Unique, combine and optimizer steps on device arrays: NumPy oracles, and the CPU's rows."""

import itertools

import numpy as np
import pytest

from sok_like import _core
from tests.core import oracles
from tests.core.test_adam_replay import OPTIONS
from tests.core.test_optimizers import CASES, TOLERANCE


def up(cuda, values, dtype):
    return cuda.CudaArray(np.asarray(values, dtype))


@pytest.mark.parametrize("world_size", [1, 3])
def test_unique_keys_by_owner(cuda, world_size):
    keys = np.random.default_rng(1).integers(-20, 20, 300)
    unique, inverse, offsets = (
        part.get() for part in cuda.cuda_unique_with_inverse(up(cuda, keys, np.int64), world_size)
    )
    np.testing.assert_array_equal(unique[inverse], keys)
    assert sorted(unique.tolist()) == sorted(set(keys.tolist()))
    owners = unique.astype(np.uint64) % np.uint64(world_size)
    np.testing.assert_array_equal(np.searchsorted(owners, np.arange(world_size + 1)), offsets)
    for owner in range(world_size):
        mine = unique[offsets[owner] : offsets[owner + 1]].tolist()
        assert mine == sorted(mine, key=keys.tolist().index)  # by first occurrence


@pytest.mark.parametrize("combiner", ["sum", "mean", "sqrtn"])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("dim", [5, 16])
def test_combine_and_its_gradient(cuda, combiner, weighted, dim):
    rng = np.random.default_rng(dim)
    num_keys, num_unique = 400, 30
    inverse = rng.integers(0, num_unique, num_keys)
    inverse[::3] = 7  # a row that goes over many tiles
    splits = np.unique(np.concatenate([[0, num_keys], rng.integers(0, num_keys, 90)]))
    splits = np.append(splits, num_keys)  # an empty sample
    weights = rng.standard_normal(num_keys).astype(np.float32) if weighted else None
    rows = rng.standard_normal((num_unique, dim)).astype(np.float32)
    grad = rng.standard_normal((len(splits) - 1, dim)).astype(np.float32)

    w = np.ones(num_keys) if weights is None else weights.astype(np.float64)
    expected = np.zeros((len(splits) - 1, dim))
    expected_grad = np.zeros((num_unique, dim))
    for s, (begin, end) in enumerate(itertools.pairwise(splits)):
        part = slice(begin, end)
        divisor = {"sum": 1.0, "mean": w[part].sum(), "sqrtn": np.sqrt((w[part] ** 2).sum())}
        if begin == end or divisor[combiner] == 0:
            continue
        share = w[part] / divisor[combiner]
        expected[s] = share @ rows[inverse[part]].astype(np.float64)
        np.add.at(expected_grad, inverse[part], share[:, None] * grad[s])

    args = (up(cuda, inverse, np.int32), up(cuda, splits, np.int64))
    device_weights = None if weights is None else up(cuda, weights, np.float32)
    out = cuda.cuda_combine(up(cuda, rows, np.float32), *args, combiner, device_weights).get()
    scale = np.abs(expected).max()
    np.testing.assert_allclose(out, expected, rtol=1e-5, atol=1e-5 * scale)
    out = cuda.cuda_combine_gradient(
        up(cuda, grad, np.float32), *args, num_unique, combiner, device_weights
    ).get()
    scale = np.abs(expected_grad).max()
    np.testing.assert_allclose(out, expected_grad, rtol=1e-5, atol=1e-5 * scale)


def run_steps(cuda, table, rule, options, dim, oracle):
    rng = np.random.default_rng(0)
    for step in range(1, 31):
        keys = rng.integers(0, 60, rng.integers(0, 40))
        grads = rng.normal(size=(len(keys), dim)).astype(np.float32)
        learning_rate = float(np.float32(0.05 / step))
        cuda.cuda_apply_gradients(
            table,
            rule,
            learning_rate,
            step,
            up(cuda, keys, np.int64),
            up(cuda, grads, np.float32),
            **options,
        )
        oracle.step(step, learning_rate, keys, grads)


@pytest.mark.parametrize("extras", [{}, {"weight_decay": 0.05, "clip_value": 0.5}])
@pytest.mark.parametrize("case", sorted(CASES))
def test_rules_against_numpy(cuda, case, extras):
    rule, options, make_oracle = CASES[case]
    dim = 8
    keys = np.arange(60)
    table = cuda.CudaTable("t", dim, a=-0.5, b=0.5, seed=3)
    oracle = make_oracle(_core.Table("t", dim, a=-0.5, b=0.5, seed=3).initial_rows(keys), **extras)
    run_steps(cuda, table, rule, {**options, **extras}, dim, oracle)
    rows = table.find(up(cuda, keys, np.int64))[0].get()
    tolerance = TOLERANCE.get(case, 1e-4)
    np.testing.assert_allclose(rows, oracle.w, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("case", sorted(set(CASES)))
@pytest.mark.parametrize("dim", [5, 16])
def test_updated_rows_are_those_of_the_cpu(cuda, case, dim):
    """In every bit while a batch is one tile of sums, closely when it is many."""
    rule, options, _ = CASES[case]
    arguments = {"a": -0.5, "b": 0.5, "seed": 3}
    device, host = cuda.CudaTable("t", dim, **arguments), _core.Table("t", dim, **arguments)
    rng = np.random.default_rng(1)
    everything = np.arange(50)

    def step(number, num_keys):
        keys = rng.integers(0, len(everything), num_keys)
        grads = rng.normal(size=(num_keys, dim)).astype(np.float32)
        arrays = up(cuda, keys, np.int64), up(cuda, grads, np.float32)
        cuda.cuda_apply_gradients(device, rule, 0.05, number, *arrays, **options)
        _core.apply_gradients(host, rule, 0.05, number, keys, grads, **options)
        rows = device.find(up(cuda, everything, np.int64))[0].get()
        return rows, host.find(everything)[0]

    for number in range(1, 11):
        rows, expected = step(number, 32)
        if case == "ftrl_all":  # its power is the device's own
            np.testing.assert_allclose(rows, expected, rtol=1e-6, atol=1e-6)
        else:
            np.testing.assert_array_equal(rows, expected)
    rows, expected = step(11, 5000)
    np.testing.assert_allclose(rows, expected, rtol=1e-5, atol=1e-5)


def test_long_sums_are_those_of_the_cpu(cuda):
    """Over many tiles; the share of an element of all that was added to it decides."""
    rng = np.random.default_rng(2)
    inverse, dim = rng.integers(0, 7, 20_000), 8
    grad = rng.normal(size=(len(inverse), dim)).astype(np.float32)
    arrays = up(cuda, grad, np.float32), up(cuda, inverse, np.int32)
    out = cuda.cuda_combine_gradient(*arrays, None, 7, "none").get()
    expected = _core.combine_gradient(grad, inverse.astype(np.int32), None, 7, "none")
    added = np.zeros((7, dim))
    np.add.at(added, inverse, np.abs(grad))
    assert (np.abs(out - expected) <= 1e-6 * added).all()


@pytest.mark.parametrize("gap", [1, 60, 600])
@pytest.mark.parametrize("case", ["step_by_step", "decay_step_by_step"])
def test_missed_steps_that_are_walked(cuda, case, gap):
    """Against dense Adam in float64 and the CPU's table, beyond the life of the momentum too."""
    options, dim = OPTIONS[case], 5
    device, host = (t("t", dim, a=-0.5, b=0.5) for t in (cuda.CudaTable, _core.Table))
    keys = np.arange(8)  # one of them never has a gradient
    oracle = oracles.Adam(host.initial_rows(keys), **options)
    rng = np.random.default_rng(0)
    for step in range(1, gap + 12):
        batch = keys[:7] if step <= 10 or step == gap + 11 else keys[:0]
        rate = float(np.float32(0.02 / np.sqrt(step)))
        grads = rng.normal(size=(len(batch), dim)).astype(np.float32)
        _core.apply_gradients(host, "adam", rate, step, batch, grads, **options)
        on_device = up(cuda, batch, np.int64), up(cuda, grads, np.float32)
        cuda.cuda_apply_gradients(device, "adam", rate, step, *on_device, **options)
        oracle.step(step, rate, batch, grads)
        if step < gap + 10:
            continue
        # At the end of the gap, which reads walk, and after the update that ends it.
        rows = device.find(up(cuda, keys, np.int64))[0].get()
        np.testing.assert_allclose(rows, oracle.w, atol=1e-5, rtol=0)
        exact = {"atol": 0, "rtol": 1e-6 if "weight_decay" in options else 0}
        np.testing.assert_allclose(rows, host.find(keys)[0], **exact)


def test_a_step_by_row_number(cuda):
    table = cuda.CudaTable("t", 4, initializer="constant", a=1.0)
    keys = up(cuda, [3, -1, 7], np.int64)
    numbers = table.row_numbers(keys, insert=True)
    grads = np.arange(12, dtype=np.float32).reshape(3, 4)
    cuda.cuda_apply_gradients_to_rows(table, "sgd", 0.5, 1, numbers, up(cuda, grads, np.float32))
    np.testing.assert_array_equal(table.find(keys)[0].get(), 1.0 - 0.5 * grads)


def test_combine_of_a_table_whose_rows_owe_steps(cuda):
    table = cuda.CudaTable("t", 4, a=-0.5, b=0.5)
    oracle = oracles.Adam(_core.Table("t", 4, a=-0.5, b=0.5).initial_rows(np.arange(60)))
    run_steps(cuda, table, "adam", {}, 4, oracle)
    keys = np.arange(60)
    numbers = table.row_numbers(up(cuda, keys, np.int64), insert=True)
    inverse = np.array([5, 6, 7, 8])
    splits = np.array([0, 1, 4])
    out = cuda.cuda_combine_of_table(
        table, numbers, up(cuda, inverse, np.int32), up(cuda, splits, np.int64), "sum"
    ).get()
    expected = np.stack([oracle.w[5], oracle.w[6:9].sum(0)])
    np.testing.assert_allclose(out, expected, rtol=1e-4, atol=1e-4)


def test_combine_of_a_table_is_in_the_order_of_its_stream(cuda):
    """Runs after the last call on the table, and before the next one."""
    if cuda is _core:
        pytest.skip("needs the emulator's count of streams that wait")
    table = cuda.CudaTable("t", 4)
    numbers = table.row_numbers(up(cuda, [1, 2], np.int64), insert=True).get()
    other = 16  # the address of a stream, which the emulator does not look at
    parts = (numbers, np.arange(2, dtype=np.int32), np.array([0, 2]))
    arrays = [cuda.CudaArray(part, stream=other) for part in parts]
    more_keys = up(cuda, [3], np.int64)
    before = cuda.num_stream_waits()
    cuda.cuda_combine_of_table(table, *arrays, "sum", stream=other)
    assert cuda.num_stream_waits() == before + 1
    table.row_numbers(more_keys, insert=True)
    assert cuda.num_stream_waits() == before + 2


def test_combine_of_a_table_with_keys_that_wait(cuda):
    table = cuda.CudaTable("t", 4, policy={"filter_freq": 3, "no_permission": -2.0})
    table.assign(up(cuda, [5], np.int64), up(cuda, np.full((1, 4), 3.0), np.float32))
    numbers = table.row_numbers(up(cuda, [5, 6], np.int64))
    inverse, splits = up(cuda, [0, 1, 1], np.int32), up(cuda, [0, 1, 3], np.int64)
    out = cuda.cuda_combine_of_table(table, numbers, inverse, splits, "sum").get()
    np.testing.assert_array_equal(out, [[3.0] * 4, [-4.0] * 4])


def test_another_optimizer_is_refused(cuda):
    table = cuda.CudaTable("t", 2)
    args = (up(cuda, [1], np.int64), up(cuda, [[0.5, 0.5]], np.float32))
    cuda.cuda_apply_gradients(table, "sgd", 0.1, 1, *args)
    with pytest.raises(ValueError, match="keeps the optimizer of its first step"):
        cuda.cuda_apply_gradients(table, "adagrad", 0.1, 1, *args)
    with pytest.raises(TypeError, match="no optimizer option 'typo'"):
        cuda.cuda_apply_gradients(table, "sgd", 0.1, 1, *args, typo=1.0)
