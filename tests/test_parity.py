"""Both layers against dense tables of stock TensorFlow, on 1 to 3 ranks."""

import functools
import itertools

import numpy as np
import pytest
import tensorflow as tf

from tests.checks import parity
from tests.checks.parity import DIM, NNZ, NUM_KEYS, RATE, SLOTS, TABLES, ranks_of
from tests.core import oracles

# Ranks, optimizer, gradient scale, and which half of the tables. What each optimizer does with rows
# is in tests/optimizers/test_rules.py.
CASES = [
    *((1, "lazy_adam", "sum", "odd"), (3, "adam", "sum", "odd")),
    pytest.param(2, "ftrl", "mean", "even", marks=pytest.mark.keras),
    *(
        pytest.param(1, name, "sum", some, marks=[pytest.mark.slow, pytest.mark.keras(slow=True)])
        for name in parity.KERAS
        for some in ("odd", "even")
    ),
]


@pytest.mark.parametrize("world_size, optimizer, scale, some", CASES)
def test_training(on_threads, world_size, optimizer, scale, some):
    check(on_threads(world_size, parity.train, optimizer, scale, some), optimizer, scale)


@pytest.mark.ranks
@pytest.mark.keras
def test_training_on_processes(on_processes):
    check(on_processes(2, parity.train, "adam", "mean", "odd"), "adam", "mean")


def check(ranks, optimizer, scale):
    """The training of the ranks is that of the oracle."""
    world_size, initial = len(ranks), ranks[0]["initial"]
    expected = oracle(optimizer, scale, world_size, initial)
    for rank, result in enumerate(ranks):
        for table, rows in result["initial"].items():
            assert rows.tobytes() == initial[table].tobytes()
        for table, weights in result["heads"].items():
            right = expected["heads"][list(TABLES).index(table)]
            for weight, value in zip(weights, right, strict=True):
                np.testing.assert_allclose(weight, value, rtol=0, atol=1e-5)
        for table, vectors in result["vectors"].items():
            for step, right in enumerate(expected["vectors"][table]):
                right = right[ranks_of(step, len(right), world_size) == rank]
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
    rows = NUM_KEYS // world_size
    assert before == [0 if TABLES[name][1] else rows for name in result["export"]]
    assert trained == after == [len(keys) for keys, _ in result["export"].values()]


def check_exported(ranks, table, expected):
    hashed = TABLES[table][1]
    numbers = parity.key_numbers() if hashed else np.arange(NUM_KEYS)
    # Rows by index are all there from the start.
    seen = expected["seen"][table] if hashed else np.ones(NUM_KEYS, bool)
    exported = {}
    for rank, result in enumerate(ranks):
        keys, values = result["export"][table]
        assert (keys.astype(np.uint64) % len(ranks) == rank).all()
        assert (np.diff(keys.astype(np.uint64)) > 0).all()
        exported.update(zip(keys.tolist(), values, strict=True))
    assert set(exported) == set(numbers[seen].tolist())
    for key, row in zip(numbers[seen].tolist(), expected["rows"][table][seen], strict=True):
        np.testing.assert_allclose(exported[key], row, rtol=0, atol=1e-5)


# ---- the oracle: dense tables, stock lookups, stock optimizers, one process ----

# All tables lie in one variable `[tables * NUM_KEYS, DIM]`, all heads in another `[weights]`: the
# optimizers work element by element, so this changes nothing but the time it takes. In float64, so
# that a difference is ours.


def oracle(optimizer_name, scale, world_size, initial):
    """What `parity.train` must give for `initial` rows, a dictionary of some of the tables.

    Returns:
        Per step and table the vectors of the whole batch; per table rows and keys; head weights.
    """
    nothing = np.zeros([NUM_KEYS, DIM], np.float32)
    every_row = [initial.get(name, nothing) for name in TABLES]
    rows = tf.Variable(np.concatenate(every_row), dtype=tf.float64)
    flat = np.concatenate([np.ravel(part) for pair in parity.head_weights() for part in pair])
    heads = tf.Variable(flat, dtype=tf.float64)
    update_rows, update_heads = _rows_update(optimizer_name), _heads_update(optimizer_name)
    vectors, seen = [], np.zeros([len(TABLES), NUM_KEYS], bool)
    for step, (ids, lengths, targets) in enumerate(parity.batches()):
        weights = parity.sample_weights(step, len(ids), world_size, scale)
        # The loss is a mean on each rank: this is each sample's factor in the mean over ranks.
        joined = weights / world_size if scale == "mean" else weights
        found, row_gradient, head_gradient = _gradients()(
            rows, heads, ids, lengths, targets, joined
        )
        vectors.append([v.numpy() for v in found])
        touched = np.stack([_touched(c, ids, lengths) for c, _ in TABLES.values()])
        seen |= touched
        update_rows(rows, row_gradient, np.flatnonzero(touched))
        # Ordinary gradients are averaged, whatever the scale of those of embeddings.
        update_heads(heads, head_gradient / (world_size if scale == "sum" else 1))
    return {
        "vectors": {n: [v[i] for v in vectors] for i, n in enumerate(TABLES)},
        "rows": dict(zip(TABLES, rows.numpy().reshape(-1, NUM_KEYS, DIM), strict=True)),
        "heads": _split_heads(heads.numpy()),
        "seen": dict(zip(TABLES, seen, strict=True)),
    }


def _touched(combiner, ids, lengths):
    if combiner is None:
        return np.isin(np.arange(NUM_KEYS), ids)
    return np.isin(np.arange(NUM_KEYS), ids[np.arange(NNZ) < lengths[..., None]])


def _split_heads(flat):
    weights, start = [], 0
    for kernel, _ in parity.head_weights():
        middle, end = start + len(kernel), start + len(kernel) + 1
        weights.append([flat[start:middle, None], flat[middle:end]])
        start = end
    return weights


@functools.cache
def _gradients():
    """(vectors, dense gradient of rows, gradient of heads) of a batch, compiled once."""

    @tf.function(reduce_retracing=True)
    def compute(rows, heads, ids, lengths, targets, weights):
        with tf.GradientTape() as tape:
            tape.watch([rows, heads])
            vectors, outputs = [], []
            head_parts = _split_heads(heads)
            for i, (combiner, _) in enumerate(TABLES.values()):
                table = rows[i * NUM_KEYS : (i + 1) * NUM_KEYS]
                if combiner is None:
                    found = tf.nn.embedding_lookup(table, ids)
                else:
                    ragged = tf.RaggedTensor.from_tensor(
                        tf.reshape(ids, [-1, NNZ]), lengths=tf.reshape(lengths, [-1])
                    )
                    found = tf.nn.safe_embedding_lookup_sparse(
                        table, ragged.to_sparse(), combiner=combiner.lower()
                    )
                    found = tf.reshape(found, [-1, SLOTS, DIM])
                kernel, bias = head_parts[i]
                vectors.append(found)
                outputs.append(tf.reshape(found, [-1, kernel.shape[0]]) @ kernel + bias)
            loss = parity._loss(outputs, targets, weights)
        row_gradient, head_gradient = tape.gradient(loss, [rows, heads])
        # Dense: Keras' optimizers do not sum the repeated indices of a sparse one.
        return vectors, tf.convert_to_tensor(row_gradient), head_gradient

    def call(rows, heads, *batch):
        ids, lengths, targets, weights = batch
        floats = (tf.constant(f, tf.float64) for f in (targets, weights))
        return compute(rows.value(), heads.value(), tf.constant(ids), tf.constant(lengths), *floats)

    return call


def _heads_update(name):
    optimizer = parity.KERAS[name]()
    return lambda heads, gradient: optimizer.apply_gradients([(gradient, heads)])


def _rows_update(name):
    if name == "lazy_adam":
        return _lazy_adam()
    if name == "ftrl":  # Keras' dense formula would move rows that no gradient names
        optimizer = tf.compat.v1.train.FtrlOptimizer(
            RATE, l1_regularization_strength=0.01, beta=0.1
        )
        return lambda rows, gradient, touched: optimizer.apply_gradients(
            [(tf.IndexedSlices(tf.gather(gradient, touched), touched), rows)]
        )
    optimizer = parity.KERAS[name]()
    return lambda rows, gradient, touched: optimizer.apply_gradients([(gradient, rows)])


def _lazy_adam():
    oracle, steps = None, itertools.count(1)

    def update(rows, gradient, touched):
        nonlocal oracle
        oracle = oracle or oracles.Adam(rows.numpy(), lazy=True)
        oracle.step(next(steps), RATE, touched, gradient.numpy()[touched])
        rows.assign(oracle.w)

    return update
