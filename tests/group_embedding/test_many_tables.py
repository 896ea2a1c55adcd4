"""Groups of so many tables that threads divide them: one call per table is the oracle."""

import threading

import numpy as np
import pytest
import tensorflow as tf

from tests.training import rows_by_key

NUM_TABLES = 40


def make_tables(sok, **options):
    """Tables of one name have the same initial rows."""
    return [
        sok.EmbeddingVariable(4, name=f"t{i}", **options.get(f"t{i}", {}))
        for i in range(NUM_TABLES)
    ]


def make_ids(seed):
    rng = np.random.default_rng(seed)
    return [
        tf.RaggedTensor.from_row_lengths(
            tf.constant(rng.integers(0, 100, 60), tf.int64), [1, 0, 9, 20, 30]
        )
        for _ in range(NUM_TABLES)
    ]


def lookup(sok, tables, ids, **kwargs):
    return sok.group_embedding_lookup_sparse(tables, ids, ["mean"] * len(tables), **kwargs)


def train(sok, tables, ids, calls):
    """A step with the group cut into as many calls; embeddings and rows."""
    optimizer = sok.OptimizerWrapper(tf.compat.v1.train.AdagradOptimizer(0.5))
    with tf.GradientTape() as tape:
        found = []
        for part in np.array_split(np.arange(len(tables)), calls):
            found += lookup(sok, [tables[i] for i in part], [ids[i] for i in part])
        loss = tf.add_n([tf.reduce_sum(f * f) for f in found])
    distinct = list({id(t): t for t in tables}.values())
    optimizer.apply_gradients(zip(tape.gradient(loss, distinct), distinct, strict=True))
    return [f.numpy() for f in found], [t.numpy().rows for t in distinct]


@pytest.mark.parametrize("repeated", [False, True])
def test_group_is_a_call_for_each_table(sok, repeated):
    results = []
    for calls in (1, NUM_TABLES):
        tables = make_tables(sok)
        named = [tables[i % 7 if repeated and i % 3 == 0 else i] for i in range(NUM_TABLES)]
        for step in range(3):
            result = train(sok, named, make_ids(step), calls)
        results.append(result)
    for group, alone in zip(*results, strict=True):
        assert len(group) > 20
        for one, other in zip(group, alone, strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-6, atol=1e-7)


def test_full_table_in_the_middle(sok):
    tables = make_tables(sok, t17={"capacity": 3}, t30={"capacity": 2})
    ids = make_ids(0)
    with pytest.raises(tf.errors.ResourceExhaustedError, match="max_capacity=3.*'t17'"):
        lookup(sok, tables, ids)
    for i, table in enumerate(tables):
        assert int(table.size()) == (0 if i in (17, 30) else len(np.unique(ids[i].values)))
    before = [t.numpy().rows for t in tables]
    evaluated = lookup(sok, tables, ids, training=False)  # no lock is held any more
    np.testing.assert_allclose(evaluated[0][0], tables[0].find(ids[0][0])[0].numpy()[0], rtol=1e-6)
    assert all((a == t.numpy().rows).all() for a, t in zip(before, tables, strict=True))


def test_update_after_keys_have_moved(sok):
    """Row numbers that the lookup found are not trusted once the table has changed."""
    table = sok.EmbeddingVariable(1, name="moved", initializer="zeros")
    ids = tf.ragged.constant([[1], [2], [3]], dtype=tf.int64)
    with tf.GradientTape() as tape:
        (found,) = lookup(sok, [table], [ids])
        loss = tf.reduce_sum(found * [[1.0], [2.0], [3.0]])
    gradient = tape.gradient(loss, table)
    table.erase([1, 2])
    sok.assign(table, [50, 51], [[10.0], [20.0]])  # in the rows that 1 and 2 had
    optimizer = sok.OptimizerWrapper(tf.compat.v1.train.GradientDescentOptimizer(1.0))
    optimizer.apply_gradients([(gradient, table)])
    assert rows_by_key(table) == {1: [-1.0], 2: [-2.0], 3: [-3.0], 50: [10.0], 51: [20.0]}


def test_several_python_threads_at_once(sok):
    """Groups of the same tables in other orders, trained and evaluated: nothing is lost."""
    tables = make_tables(sok)
    failures = []

    def work(thread):
        named = tables[::-1] if thread % 2 else [*tables[:30], *tables[:10]]
        optimizer = sok.OptimizerWrapper(tf.compat.v1.train.GradientDescentOptimizer(1.0))

        @tf.function
        def gradients(ids):
            with tf.GradientTape() as tape:
                found = lookup(sok, named, ids, training=thread != 3)
            return tape.gradient(found, tables)

        try:
            for i in range(4):
                ids = tf.ragged.stack(make_ids(10 * thread + i))
                pairs = zip(gradients(ids), tables, strict=True)
                if thread != 3:
                    optimizer.apply_gradients([(g, v) for g, v in pairs if g is not None])
        except Exception as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=[t], daemon=True) for t in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(200)
    assert not any(thread.is_alive() for thread in threads)
    assert failures == []
    # Each of the 4 samples with keys took 1 in all off each column, in 4 steps of each thread.
    for i, table in enumerate(tables):
        keys, rows = sok.export(table)
        initial = sok.EmbeddingVariable(4, name=f"t{i}").find(keys)[0]
        times = 1 + 2 * (i < 10) + 2 * (i < 30)
        np.testing.assert_allclose(tf.reduce_sum(initial - rows, 0), [16 * times] * 4, rtol=1e-4)
