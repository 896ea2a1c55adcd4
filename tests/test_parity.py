"""Both layers against dense tables of stock TensorFlow: six optimizers, 1 to 4 ranks."""

import functools

import numpy as np
import pytest

from tests.checks import oracle, parity

CASES = [
    (world_size, optimizer, scale)
    for world_size in (1, 2, 3, 4)
    for optimizer in parity.OPTIMIZERS
    for scale in parity.scales(world_size, optimizer)
]


def case(world_size, optimizer, scale, *table):
    marks = [
        *([pytest.mark.ranks] if world_size > 1 else []),
        *([pytest.mark.keras(slow=optimizer in ("sgd", "momentum"))] if world_size <= 2 else []),
    ]
    name = "-".join([str(world_size), optimizer, scale, *table])
    return pytest.param(world_size, optimizer, scale, *table, marks=marks, id=name)


each_case = pytest.mark.parametrize("world_size, optimizer, scale", [case(*c) for c in CASES])
each_table = pytest.mark.parametrize(
    "world_size, optimizer, scale, table",
    [case(*c, table) for c in CASES for table in parity.tables(*c)],
)


@pytest.fixture
def outcome(world_size, optimizer, scale, rank_results):
    ranks = rank_results(world_size, f"parity.{optimizer}.{scale}")
    return ranks, _oracle(world_size, optimizer, scale, _Once(ranks[0]["initial"]))


class _Once(dict):
    """Initial rows, equal in every run of a case; hashable, so the oracle runs once per case."""

    __hash__ = object.__hash__

    def __eq__(self, other):
        return True


@functools.cache
def _oracle_of(world_size, optimizer, scale):
    return []


def _oracle(world_size, optimizer, scale, initial):
    kept = _oracle_of(world_size, optimizer, scale)
    if not kept:
        kept.append(oracle.train(optimizer, scale, world_size, initial))
    return kept[0]


@each_table
def test_vectors_of_every_step(outcome, world_size, table):
    ranks, expected = outcome
    for step, owners in enumerate(oracle.batch_ranks(world_size)):
        for rank, result in enumerate(ranks):
            vectors = expected["vectors"][table][step][owners == rank]
            np.testing.assert_allclose(
                result["vectors"][table][step].reshape(vectors.shape), vectors, rtol=0, atol=1e-5
            )


@each_table
def test_rows_read_by_evaluation_lookups(outcome, table):
    ranks, expected = outcome
    for result in ranks:
        np.testing.assert_allclose(
            result["final"][table], expected["rows"][table], rtol=0, atol=1e-5
        )


@each_table
def test_exported_keys_and_rows(outcome, world_size, table):
    ranks, expected = outcome
    hashed = parity.TABLES[table][1]
    numbers = parity.key_numbers() if hashed else np.arange(parity.NUM_KEYS)
    seen, rows = expected["seen"][table], expected["rows"][table]
    exported = {}
    for rank, result in enumerate(ranks):
        keys, values = result["export"][table]
        assert (keys.astype(np.uint64) % world_size == rank).all()
        assert (np.diff(keys.astype(np.uint64)) > 0).all()
        exported.update(zip(keys.tolist(), values, strict=True))
    if not hashed:  # rows by index are all there from the start
        seen = np.ones_like(seen)
    assert set(exported) == set(numbers[seen].tolist())
    for key, row in zip(numbers[seen].tolist(), rows[seen], strict=True):
        np.testing.assert_allclose(exported[key], row, rtol=0, atol=1e-5)


@each_case
def test_ordinary_weights(outcome):
    ranks, expected = outcome
    for result in ranks:
        for table, weights in result["heads"].items():
            right = expected["heads"][list(parity.TABLES).index(table)]
            for weight, value in zip(weights, right, strict=True):
                np.testing.assert_allclose(weight, value, rtol=0, atol=1e-5)


@each_case
def test_evaluation_inserts_nothing(outcome, world_size):
    for result in outcome[0]:
        before, trained, after = result["sizes"]
        rows = parity.NUM_KEYS // world_size
        assert before == [0 if parity.TABLES[name][1] else rows for name in result["export"]]
        assert trained == after == [len(keys) for keys, _ in result["export"].values()]


@each_case
def test_initial_rows_are_the_same_on_all_ranks(outcome):
    ranks, _ = outcome
    for result in ranks[1:]:
        for table, rows in result["initial"].items():
            assert rows.tobytes() == ranks[0]["initial"][table].tobytes()
