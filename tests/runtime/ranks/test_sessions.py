"""Ranks stay in step in `tf.compat.v1` sessions, which know no order but that of the data."""

import numpy as np
import pytest
import tensorflow as tf

import sok_like as sok
from tests.training import layer_of

v1 = tf.compat.v1
STEPS, WRONG = 15, 10**6
# For what has no control flow of its own, and whose failure a loop shows with both.
once = pytest.mark.parametrize("in_sessions", [2], indirect=True)


@pytest.fixture(params=[2, 1], ids="control_flow_v{}".format)
def in_sessions(request, on_threads):
    """Runs a function of a session on two ranks, with each control flow of TensorFlow's.

    A session has two devices, between which tensors travel.
    """

    def check(function):
        config = v1.ConfigProto(device_count={"CPU": 2})
        with tf.Graph().as_default(), v1.Session(config=config) as session:
            session.run(sok.Init(global_batch_size=12, seed=7))
            function(session)

    (v1.enable_control_flow_v2 if request.param == 2 else v1.disable_control_flow_v2)()
    yield lambda function: on_threads(2, lambda: check(function))
    v1.enable_control_flow_v2()


def ramp(shape, dtype=None):
    """Row k is k in all columns."""
    return np.arange(shape[0], dtype=np.float32)[:, None] * np.ones(shape, np.float32)


def check_run(session, fetches, feed, step, expected):
    """One rank has fed what fails in every third run: all raise, and name it."""
    if step % 3 == 1:
        with pytest.raises(tf.errors.InvalidArgumentError) as raised:
            session.run(fetches, feed)
        assert str(WRONG) in raised.value.message and f"rank {step % 2}: " in raised.value.message
    else:
        assert [float(np.mean(value)) for value in session.run(fetches, feed)] == expected


@once
def test_a_run_that_failed_leaves_ranks_in_the_same_step(in_sessions):
    """The first of the lookups, on another device, fails."""

    def check(session):
        bad, good = (v1.placeholder(tf.int64, [None]) for _ in range(2))
        rows_only = layer_of("rows", 1.0, capacity=8, use_hashtable=False)
        others = [layer_of(f"other_{i}", 3.0 + i) for i in range(3)]
        with tf.device("CPU:1"):
            moved = bad + tf.zeros_like(bad)
        fetches = [rows_only(moved), *(layer(good) for layer in others)]
        exported = [sok.export(layer.embedding_variable)[0] for layer in others]
        session.run(v1.global_variables_initializer())
        for step in range(STEPS):
            wrong = step % 3 == 1 and sok.rank() == step % 2
            feed = {bad: [WRONG if wrong else step % 8], good: [100 * sok.rank() + step]}
            check_run(session, fetches, feed, step, [1.0, 3.0, 4.0, 5.0])
        asked = [100 * r + step for r in range(2) for step in range(STEPS) if step % 3 != 1]
        mine = sorted(key for key in asked if key % 2 == sok.rank())
        assert [sorted(keys.tolist()) for keys in session.run(exported)] == [mine] * 3

    in_sessions(check)


@once
def test_what_is_fetched_is_looked_up_and_nothing_else(in_sessions):
    """Runs fetch some of the lookups of a graph, in another order than they were made."""

    def check(session):
        keys = v1.placeholder(tf.int64, [None])
        rows = [layer_of(f"part_{i}", float(i))(keys) for i in range(4)]
        layer_of("never_fed", 9.0)(v1.placeholder(tf.int64, [None]))
        session.run(v1.global_variables_initializer())
        for order in ([3], [2, 0], [3, 2, 1, 0], [1]):
            found = session.run([rows[i] for i in order], {keys: [1, 2, 3]})
            assert [float(values.mean()) for values in found] == order

    in_sessions(check)


def test_a_lookup_of_what_another_gave_is_trained(in_sessions):
    def check(session):
        keys = v1.placeholder(tf.int64, [None])
        first = layer_of("first", 2.0, gradient_scale="sum")
        second = layer_of("second", 5.0, gradient_scale="sum")
        rows = first(keys)
        found = second(keys + tf.cast(rows[:, 0], tf.int64))
        loss = tf.reduce_sum(rows) + 3.0 * tf.reduce_sum(found)
        optimizer = sok.OptimizerWrapper(v1.train.GradientDescentOptimizer(1.0))
        train, again = optimizer.minimize(loss), second(keys + 2)
        session.run(v1.global_variables_initializer())
        session.run(train, {keys: [10 * sok.rank()]})
        after = session.run([rows, again], {keys: [10 * (1 - sok.rank())]})
        # Keys 0 and 10 of `first` start at 2, keys 2 and 12 of `second` at 5; gradients 1 and 3.
        assert [values.tolist() for values in after] == [[[1.0] * 2], [[2.0] * 2]]

    in_sessions(check)


def test_lookups_in_loops_branches_and_functions(in_sessions):
    """Two loops, one of them within a loop, branches, a function and a lookup, in one run each."""

    def check(session):
        keys, flag = v1.placeholder(tf.int64, [None, None]), v1.placeholder(tf.bool, [])
        names = ("loop", "inner", "yes", "no", "function", "outside")
        layers = {name: layer_of(name, ramp) for name in names}

        def total(name, keys):
            return tf.reduce_sum(layers[name](keys))

        def loop(body):
            """The sum of `body` of each row of the keys, times 1, 2, ..; 10 iterations at once."""
            return tf.while_loop(
                lambda i, _: i < tf.shape(keys)[0],
                lambda i, so_far: (i + 1, so_far + body(keys[i]) * tf.cast(i + 1, tf.float32)),
                (0, 0.0),
            )[1]

        fetches = [
            loop(lambda row: total("loop", row)),
            loop(lambda row: loop(lambda other: total("inner", row + other))),
            tf.cond(flag, lambda: total("yes", keys[0]), lambda: total("no", keys[0])),
            tf.function(lambda row: total("function", row))(keys[1]),
            total("outside", keys[2]),
        ]
        session.run(v1.global_variables_initializer())
        for step in range(6):
            shape = [4, 3 + sok.rank() + step % 2]
            fed = np.random.default_rng([sok.rank(), step]).integers(0, 1000, shape)
            found = session.run(fetches, {keys: fed, flag: step % 3 == 0})
            # Row k is k in both of its columns.
            sums, times = 2 * fed.sum(1), np.arange(1, 5)
            inner = times[:, None] * times * (sums[:, None] + sums)
            assert found == [(times * sums).sum(), inner.sum(), *sums[:3]], step

    in_sessions(check)


def test_a_loop_that_failed_leaves_ranks_in_the_same_step(in_sessions):
    """Its third iteration fails; a lookup uses its result."""

    def check(session):
        keys = v1.placeholder(tf.int64, [4, 2])
        layer = layer_of("rows_in_loop", ramp, capacity=8, use_hashtable=False)
        after = layer_of("after_loop", ramp)
        looped = tf.while_loop(
            lambda i, _: i < 4,
            lambda i, total: (i + 1, total + tf.reduce_sum(layer(keys[i]))),
            (0, 0.0),
        )[1]
        fetches = [looped, tf.reduce_sum(after(tf.cast(looped, tf.int64)[None]))]
        session.run(v1.global_variables_initializer())
        for step in range(STEPS):
            fed = np.arange(8).reshape(4, 2) + step % 3
            if step % 3 == 1 and sok.rank() == step % 2:
                fed[2, 0] = WRONG
            total = 2 * (np.arange(8) + step % 3).sum()
            check_run(session, fetches, {keys: fed}, step, [total, 2 * total])

    in_sessions(check)
