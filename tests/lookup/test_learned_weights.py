"""The gradient of the weights of keys: `tf.nn.embedding_lookup_sparse` on dense rows is the oracle.

What all calls look up: repeated keys, empty samples, and one whose weights add up to 0.
"""

import contextlib

import numpy as np
import pytest
import tensorflow as tf

from tests.group_embedding.test_lookup_sparse import (
    KEYS,
    expected,
    keys_at,
    make_ev,
    ragged,
    rows_of,
)
from tests.training import train_step

POSITIONS = [[1, 2, 1], [], [3, 3], [0, 5, 6, 7], [4], [1, 2], []]
WEIGHTS = [[0.5, 2.0, 1.5], [], [1.0, -1.0], [1.0, 0.25, 3.0, 0.5], [0.0], [2.0, 1.0], []]
FLAT = np.concatenate(WEIGHTS).astype(np.float32)
FACTORS = np.random.default_rng(3).normal(size=[len(POSITIONS), 3]).astype(np.float32)


def right_gradient(combiner, rows=None, positions=POSITIONS, flat=FLAT, factors=FACTORS):
    """Of the sum of outputs times factors with respect to the flat weights."""
    table = tf.constant(rows_of(3, 0) if rows is None else rows, tf.float64)
    flat = tf.constant(flat, tf.float64)
    with tf.GradientTape() as tape:
        tape.watch(flat)
        ids = ragged(positions)
        found = expected(table, ids, combiner, ids.with_values(flat))
        loss = tf.reduce_sum(found * factors)
    return tf.convert_to_tensor(tape.gradient(loss, flat)).numpy()


def shuffled(ids, flat):
    """Sparse ids and weights in another order, with gaps; differentiable."""
    sparse = ids.to_sparse()
    order = np.random.default_rng(1).permutation(len(FLAT))
    indices = tf.gather(sparse.indices * [1, 3], order)
    shape = tf.constant([len(POSITIONS), 20], tf.int64)
    return (
        tf.SparseTensor(indices, tf.gather(sparse.values, order), shape),
        tf.SparseTensor(indices, tf.gather(flat, order), shape),
    )


def look_up(sok, table, flat, combiner, kind="ragged", training=None):
    ids = ragged(keys_at(POSITIONS))
    weights = ids.with_flat_values(flat)
    if kind == "sparse":
        ids, weights = shuffled(ids, flat)
    if kind == "packed":
        (found,) = sok.group_embedding_lookup_sparse(
            [table],
            tf.stack([ids]),
            combiner,
            sp_weights=tf.stack([weights]),
            training=training,
        )
        return found
    # Features without weights and with constant ones share the call.
    found = sok.group_embedding_lookup_sparse(
        [table] * 3,
        [ids] * 3,
        [combiner] * 3,
        sp_weights=[None, weights, weights.with_values(tf.ones_like(weights.values))],
        training=training,
    )
    return found[1]


def gradients_of(call, sources):
    """Of the sum of what `call` returns times factors."""
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(call() * FACTORS)
    return tape.gradient(loss, sources)


def assert_right(gradient, combiner, rows=None, rtol=1e-5):
    np.testing.assert_allclose(gradient, right_gradient(combiner, rows), rtol=rtol, atol=1e-5)


@pytest.mark.keras
@pytest.mark.parametrize(
    "combiner, kind",
    [("sum", "ragged"), ("mean", "ragged"), ("sqrtn", "sparse"), ("mean", "packed")],
)
def test_equals_stock(sok, combiner, kind):
    """Eagerly, in a function with the tape, and in one that a tape calls; and the table's."""
    table = make_ev(sok, "weighted", 3)
    learned = tf.Variable(FLAT / 2)

    def look_up_here(flat):
        return look_up(sok, table, flat, combiner, kind)

    def with_tape():
        found = gradients_of(lambda: look_up_here(learned * 2.0), [table, learned])
        return found[0].values, found[1] / 2.0

    called = tf.function(look_up_here, autograph=False)
    rows = []
    for function in (with_tape, tf.function(with_tape, autograph=False)):
        of_table, of_weights = function()
        assert_right(of_weights, combiner)
        rows.append(of_table)
    np.testing.assert_allclose(*rows, rtol=1e-6)
    assert_right(gradients_of(lambda: called(learned * 2.0), learned) / 2, combiner)


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_rows_are_those_of_the_lookup(sok, dtype, training):
    """New keys, 16-bit rows, rows that owe steps of Adam; not those after the update."""
    table = sok.EmbeddingVariable(3, name=f"{dtype}{training}", dtype=dtype, initializer="normal")
    learned = tf.Variable(FLAT)
    dense = dtype == "float32"  # 16-bit rows need a lazy rule
    optimizer = sok.OptimizerWrapper(tf.keras.optimizers.Adam(0.1), lazy=not dense)
    for keys in (KEYS, KEYS[:1], KEYS[:1]):  # the rows of all keys but one owe two steps
        if not dense:
            break
        train_step(optimizer, table, lambda: tf.reduce_sum(tf.gather(table, keys)))  # noqa: B023
    with tf.GradientTape(persistent=True) as tape:
        found = look_up(sok, table, learned, "mean", training=training)
        loss = tf.reduce_sum(found * FACTORS)
    rows = table.find(KEYS)[0].numpy()
    optimizer.apply_gradients([(tape.gradient(loss, table), table)])
    assert np.abs(table.find(KEYS)[0].numpy() - rows).max() > 0.01
    assert_right(tape.gradient(loss, learned), "mean", rows, rtol=1e-4)


def test_keys_that_a_filter_refuses_have_the_default_row(sok):
    option = sok.EmbeddingVariableOption(filter_option=sok.CounterFilter(2))
    table = sok.get_embedding_variable("filtered", 3, ev_option=option, initializer="normal")
    learned = tf.Variable(FLAT)
    for _ in range(2):
        tf.nn.embedding_lookup(table, KEYS[:4])
    gradient = gradients_of(lambda: look_up(sok, table, learned, "sqrtn"), learned)
    rows, present = (t.numpy() for t in table.find(KEYS))
    assert present[:4].all() and not present[4:].any()
    assert_right(gradient, "sqrtn", rows)


def test_other_doors(sok):
    """SOK 2.x, and a variable in a group."""
    from sok_like import sok2

    ids, learned = ragged(keys_at(POSITIONS)), tf.Variable(FLAT)
    dynamic = sok2.DynamicVariable(3, name="dynamic")
    sok2.assign(dynamic, KEYS, rows_of(3, 0))
    static = sok2.Variable(rows_of(3, 0), name="static")

    of_positions = ragged(POSITIONS)
    variable = tf.Variable(rows_of(3, 0))
    calls = {
        "variable": lambda w: sok.group_embedding_lookup_sparse(
            variable, [of_positions], "mean", sp_weights=[of_positions.with_flat_values(w)]
        )[0],
        "dynamic": lambda w: sok2.lookup_sparse(dynamic, ids, ids.with_flat_values(w), "mean"),
        "static": lambda w: sok2.lookup_sparse(
            static, of_positions, ids.with_flat_values(w), "mean"
        ),
        "list": lambda w: sok2.lookup_sparse(
            [static, dynamic], [of_positions, ids], [ids.with_flat_values(w)] * 2, ["mean"] * 2
        )[1],
    }
    for call in calls.values():
        assert_right(gradients_of(lambda call=call: call(learned), learned), "mean")


def test_a_session(sok):
    v1 = tf.compat.v1
    with tf.Graph().as_default(), v1.Session() as session:
        session.run(sok.Init(global_batch_size=12, seed=7))
        table = sok.EmbeddingVariable(3, name="session", initializer="normal")
        learned = v1.get_variable("learned", initializer=FLAT)
        given = v1.placeholder(tf.float32, [None])
        found = []
        for flat in (learned, given):
            output = look_up(sok, table, tf.identity(flat), "mean")
            found += tf.gradients(output * FACTORS, flat)
        rows, _ = table.find(KEYS)
        train = sok.OptimizerWrapper(v1.train.GradientDescentOptimizer(0.5)).minimize(
            tf.reduce_sum(look_up(sok, table, tf.identity(learned), "mean") * FACTORS)
        )
        session.run(v1.global_variables_initializer())
        rows = session.run(rows)
        gradients = session.run(found, {given: FLAT})
        session.run(train)
        moved = session.run(learned)
    for gradient in (*gradients, (FLAT - moved) / 0.5):
        assert_right(gradient, "mean", rows, rtol=1e-4)


def kept(sok, table, flat, with_tape=False, asks=True):
    """Whether the lookup of a function keeps rows, called within a tape if it `asks`."""

    def inner(given):
        return look_up(sok, table, flat(given), "mean", "packed")

    def taped(given):
        return gradients_of(lambda: inner(given), table).values

    function = tf.function(taped if with_tape else inner, autograph=False)
    with tf.GradientTape() if asks and not with_tape else contextlib.nullcontext():
        function(tf.constant(FLAT))
    graph = function.get_concrete_function(tf.constant(FLAT)).graph
    (op,) = (op for op in graph.get_operations() if op.type == "SokLookup")
    return any(op.get_attr("keep_rows"))


def test_rows_are_kept_only_for_weights_that_may_be_learned(sok):
    """A tape knows what it watches. A tape around a function may watch its arguments."""
    table, learned = make_ev(sok, "kept", 3), tf.Variable(FLAT)
    assert kept(sok, table, lambda given: learned * 2.0)
    assert kept(sok, table, lambda given: learned * 2.0, with_tape=True)
    assert kept(sok, table, lambda given: given * 2.0)
    assert not kept(sok, table, lambda given: given * 2.0, with_tape=True)
    assert not kept(sok, table, lambda given: given * 2.0, asks=False)


def test_no_keys_and_second_order(sok):
    table, data, learned = make_ev(sok, "few", 3), tf.constant(FLAT), tf.Variable(FLAT)
    with tf.GradientTape() as outer:
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(look_up(sok, table, learned * 1.0, "mean") ** 2)
        gradient = tape.gradient(loss, learned)
    with pytest.raises(NotImplementedError, match="cannot be differentiated again"):
        outer.gradient(gradient, learned)
    with tf.GradientTape() as tape:
        tape.watch(data)
        empty = ragged([[], []])
        (found,) = sok.group_embedding_lookup_sparse(
            [table], [empty], "mean", sp_weights=[empty.with_values(data[:0])]
        )
    assert tape.gradient(found, data).numpy().tolist() == [0.0] * len(FLAT)
