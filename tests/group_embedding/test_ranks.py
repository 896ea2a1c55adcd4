"""Group lookups on ranks against dense tables of stock TensorFlow in one process."""

import functools

import numpy as np
import pytest
import tensorflow as tf

from tests.checks import groups, oracle, parity
from tests.checks.groups import BATCH, DENSE, FEATURES, NUM_KEYS
from tests.lookup.test_learned_weights import right_gradient

each_world = pytest.mark.parametrize("world_size", [1, 3])
each_training = pytest.mark.parametrize("world_size, optimizer", [(1, "ftrl"), (3, "adam")])


@functools.cache
def _oracle(optimizer, world_size, initial):
    """Per step and feature the vectors of the whole batch; per table the rows; all in float64."""
    tables = {
        name: tf.Variable(np.frombuffer(rows, np.float32).reshape(NUM_KEYS, -1), dtype=tf.float64)
        for name, rows in initial
    }
    updates = {
        name: _dense_update(optimizer) if name in DENSE else oracle._rows_update(optimizer)
        for name in tables
    }
    vectors = []
    for features, targets in groups.batches():
        with tf.GradientTape() as tape:
            found = [
                _stock(tables[feature[0]], feature, *arrays)
                for feature, arrays in zip(FEATURES, features, strict=True)
            ]
            loss = groups.loss_of(found, tf.constant(targets, tf.float64))
        gradients = dict(zip(tables, tape.gradient(loss, list(tables.values())), strict=True))
        vectors.append([v.numpy() for v in found])
        for name, table in tables.items():
            gradient = tf.convert_to_tensor(gradients[name])
            if name in DENSE:  # averaged over ranks, as all ordinary gradients are
                updates[name](table, gradient / world_size)
            else:
                updates[name](table, gradient, _touched(name, features))
    return vectors, {name: table.numpy() for name, table in tables.items()}


def _dense_update(optimizer):
    made = groups.keras_optimizer(optimizer)
    return lambda table, gradient: made.apply_gradients([(gradient, table)])


def _touched(name, features):
    """Positions of the table's keys in a batch, whatever their weights."""
    mask = np.zeros(NUM_KEYS, bool)
    for (table, _, _, _), (positions, lengths, _) in zip(FEATURES, features, strict=True):
        if table == name:
            mask[positions[np.arange(positions.shape[1]) < lengths[:, None]]] = True
    return np.flatnonzero(mask)


def _stock(table, feature, positions, lengths, weights):
    """`tf.nn.embedding_lookup_sparse` of the samples for which it is defined; zeros elsewhere."""
    _, combiner, weighted, _ = feature
    there = np.arange(positions.shape[1]) < lengths[:, None]
    defined = (there * (weights if weighted else 1)).sum(axis=1) > 0
    samples, places = np.nonzero(there[defined])
    indices = np.stack([samples, places], axis=1)
    ids = tf.SparseTensor(indices, positions[defined][samples, places], [BATCH, there.shape[1]])
    given = weights[defined][samples, places].astype(np.float64)
    found = tf.nn.embedding_lookup_sparse(
        table, ids, ids.with_values(given) if weighted else None, combiner=combiner
    )
    return tf.scatter_nd(np.flatnonzero(defined)[:, None], found, [BATCH, table.shape[1]])


@pytest.fixture
def outcome(optimizer, world_size, on_threads):
    ranks = on_threads(world_size, groups.train, optimizer)
    initial = tuple((name, rows.tobytes()) for name, rows in ranks[0]["initial"].items())
    return ranks, _oracle(optimizer, world_size, initial)


@each_training
def test_vectors_of_every_step(outcome, world_size):
    ranks, (vectors, _) = outcome
    for step in range(groups.STEPS):
        owners = parity.ranks_of(step, BATCH, world_size)
        for rank, result in enumerate(ranks):
            for i, ours in enumerate(result["vectors"][step]):
                # Before the first update they differ by rounding only.
                atol = 1e-6 if step == 0 else 1e-5
                np.testing.assert_allclose(
                    ours, vectors[step][i][owners == rank], rtol=0, atol=atol, err_msg=FEATURES[i]
                )


@each_training
def test_rows_after_training(outcome):
    ranks, (_, rows) = outcome
    for result in ranks:
        for name, right in rows.items():
            assert np.abs(right - result["initial"][name]).max() > 0.01
            np.testing.assert_allclose(
                result["final"][name], right, rtol=0, atol=1e-5, err_msg=name
            )


@each_world
def test_placement_does_not_depend_on_the_size_of_a_group(on_threads, world_size):
    for rank, tables in enumerate(on_threads(world_size, groups.placement)):
        keys = groups.keys().astype(np.uint64)
        own = sorted(keys[keys % np.uint64(world_size) == rank])
        for exported in tables:
            assert exported.astype(np.uint64).tolist() == own


@each_world
def test_sequences(on_threads, world_size):
    right = np.zeros([4, 3, 2], np.float32)
    for (sample, place), position in zip(
        [(0, 0), (2, 0), (2, 1), (2, 2), (3, 0), (3, 1)], range(6), strict=True
    ):
        right[sample, place] = position, position + 0.5
    for ragged, sparse, empty in on_threads(world_size, groups.sequences):
        np.testing.assert_array_equal(ragged, right)
        np.testing.assert_array_equal(sparse, right)
        assert empty.shape == (2, 0, 2)


@each_world
def test_packed_ids_are_a_list(on_threads, world_size):
    for lists, packed in on_threads(world_size, groups.packed):
        assert len(lists) == len(packed) == 9
        for right, ours in zip(lists, packed, strict=True):
            np.testing.assert_array_equal(ours, right)
            assert ours.any()


@each_world
def test_learned_weights(on_threads, world_size):
    """Of spread tables, and of dense and localized ones, which travel by another exchange."""
    for rank, (found, alone) in enumerate(on_threads(world_size, groups.learned_weights)):
        rows, weights, factors = groups.learned(rank)
        for combiner, gradients in found.items():
            right = right_gradient(combiner, rows, groups.LEARNED, weights, factors)
            for gradient in gradients:
                np.testing.assert_allclose(gradient, right, rtol=1e-4, atol=1e-5)
        assert (alone is None) == (rank > 0)
        if rank == 0:  # which alone has watched them
            np.testing.assert_allclose(alone, found["mean"][0], rtol=1e-6)


@each_world
def test_gradient_scales(on_threads, world_size):
    for gradients in on_threads(world_size, groups.gradient_scales):
        for (scale, _), values in gradients.items():
            np.testing.assert_allclose(values, world_size if scale == "sum" else 1, rtol=1e-6)


@each_world
def test_reference_variables_in_a_group(on_threads, world_size):
    uses = np.array([*([1] * world_size), *([0] * (3 - world_size)), world_size], float)
    for kind, table, dense in on_threads(world_size, groups.reference_variables):
        assert kind == "RefVariable"
        np.testing.assert_allclose(table, np.repeat(1 - 0.5 * uses, 2).reshape(4, 2))
        # Ordinary gradients are averaged over ranks.
        np.testing.assert_allclose(
            dense, np.repeat(1 - 0.5 * uses / world_size, 2).reshape(4, 2), rtol=1e-6
        )


@each_world
def test_switch(on_threads, world_size):
    ranks = on_threads(world_size, groups.strategy)
    for result in ranks:
        assert result["graph"] == result["collective"][0] == world_size
        # One seed, though none was given.
        np.testing.assert_array_equal(result["collective"][1], ranks[0]["collective"][1])
        for choice in ("localized", None):
            if world_size == 1:
                assert result[choice][0] == 1
            else:
                assert f"strategy={choice!r} in a job of {world_size}" in result[choice]


def test_any_number_of_tables_takes_two_collectives_forward_and_one_back(on_threads):
    for counts in on_threads(2, groups.collectives):
        # The fourth is in a branch for few steps: it compares the ordinary variable over ranks.
        assert counts == {1: (2, 4), 12: (2, 4)}
