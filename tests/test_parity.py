"""Both layers against dense tables of stock TensorFlow, on 1 to 3 ranks."""

import numpy as np
import pytest

from tests.checks import oracle, parity

# Ranks, optimizer, gradient scale, and how many of the tables: each other one, or all.
CASES = [
    *((1, optimizer, "sum", "all") for optimizer in parity.OPTIMIZERS),
    *((3, "adam", "sum", "odd"), (2, "ftrl", "mean", "even")),
]


@pytest.mark.parametrize(
    "world_size, optimizer, scale, some",
    [pytest.param(*c, marks=[pytest.mark.keras] * (c[1] in ("adam", "ftrl"))) for c in CASES],
)
def test_training(on_threads, world_size, optimizer, scale, some):
    check(on_threads(world_size, parity.train, optimizer, scale, some), optimizer, scale)


@pytest.mark.ranks
@pytest.mark.keras
def test_training_on_processes(on_processes):
    check(on_processes(2, parity.train, "adam", "mean", "odd"), "adam", "mean")


def check(ranks, optimizer, scale):
    """The training of the ranks is that of the oracle."""
    world_size, initial = len(ranks), ranks[0]["initial"]
    expected = oracle.train(optimizer, scale, world_size, initial)
    for rank, result in enumerate(ranks):
        for table, rows in result["initial"].items():
            assert rows.tobytes() == initial[table].tobytes()
        for table, weights in result["heads"].items():
            right = expected["heads"][list(parity.TABLES).index(table)]
            for weight, value in zip(weights, right, strict=True):
                np.testing.assert_allclose(weight, value, rtol=0, atol=1e-5)
        for table, vectors in result["vectors"].items():
            for step, owners in enumerate(oracle.batch_ranks(world_size)):
                right = expected["vectors"][table][step][owners == rank]
                found = vectors[step].reshape(right.shape)
                np.testing.assert_allclose(found, right, rtol=0, atol=1e-5)
            right = expected["rows"][table]
            np.testing.assert_allclose(result["final"][table], right, rtol=0, atol=1e-5)
        check_sizes(result, world_size)
    for table in initial:
        check_exported(ranks, table, expected)


def check_sizes(result, world_size):
    """Evaluation inserts nothing."""
    before, trained, after = result["sizes"]
    rows = parity.NUM_KEYS // world_size
    assert before == [0 if parity.TABLES[name][1] else rows for name in result["export"]]
    assert trained == after == [len(keys) for keys, _ in result["export"].values()]


def check_exported(ranks, table, expected):
    hashed = parity.TABLES[table][1]
    numbers = parity.key_numbers() if hashed else np.arange(parity.NUM_KEYS)
    # Rows by index are all there from the start.
    seen = expected["seen"][table] if hashed else np.ones(parity.NUM_KEYS, bool)
    exported = {}
    for rank, result in enumerate(ranks):
        keys, values = result["export"][table]
        assert (keys.astype(np.uint64) % len(ranks) == rank).all()
        assert (np.diff(keys.astype(np.uint64)) > 0).all()
        exported.update(zip(keys.tolist(), values, strict=True))
    assert set(exported) == set(numbers[seen].tolist())
    for key, row in zip(numbers[seen].tolist(), expected["rows"][table][seen], strict=True):
        np.testing.assert_allclose(exported[key], row, rtol=0, atol=1e-5)
