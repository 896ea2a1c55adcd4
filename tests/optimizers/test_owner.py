"""A table and the optimizers that train it, one after the other and side by side.

The oracle is a dense variable under stock optimizers, each of which keeps moments of its own.
"""

import numpy as np
import pytest
import tensorflow as tf

from tests.training import train_step

pytestmark = pytest.mark.keras
keras = tf.keras.optimizers
START = np.array([[1.0, -2.0], [0.5, 3.0], [2.0, 2.0]], np.float32)
IDS = [[0, 1, 1], [2, 0, 2], [1, 1, 0]]
MAKE = {
    "adam": lambda rate: keras.Adam(rate),
    "adagrad": lambda rate: keras.Adagrad(rate),
    "momentum": lambda rate: keras.SGD(rate, momentum=0.9),
    "sgd": lambda rate: keras.SGD(rate),
}


@pytest.fixture
def table(sok):
    table = sok.EmbeddingVariable(2, name="owned")
    sok.assign(table, np.arange(3), START)
    return table


def step_of(variable, optimizer, lookup):
    """One step, as a function of ids, on the loss of their rows."""

    def step(ids):
        train_step(optimizer, variable, lambda: tf.reduce_sum(lookup(ids) ** 2))

    return step


def of_table(sok, table, optimizer):
    return step_of(table, sok.OptimizerWrapper(optimizer), lambda ids: tf.gather(table, ids))


def of_dense(variable, optimizer):
    def lookup(ids):  # with a dense gradient, in which repeated ids are summed
        return tf.one_hot(ids, 3) @ variable

    return step_of(variable, optimizer, lookup)


def rows_of(table):
    return table.find(np.arange(3))[0].numpy()


def test_the_first_step_of_a_function_is_traced_once(sok, table):
    """As with stock variables, where the optimizer was built before."""
    optimizer = sok.OptimizerWrapper(keras.Adam(0.1))
    optimizer.build([table])
    step = tf.function(step_of(table, optimizer, lambda ids: tf.gather(table, ids)))
    step(tf.constant(IDS[0]))
    assert step.experimental_get_tracing_count() == 1


@pytest.mark.parametrize(
    "name, compiled", [("adam", True), ("adagrad", False), ("momentum", True), ("sgd", False)]
)
def test_a_new_optimizer_starts_anew(sok, table, name, compiled):
    """As after a second `compile`: moments are those of its own steps."""
    dense = tf.Variable(START)
    for rate in (0.1, 0.05, 0.02):
        ours = of_table(sok, table, MAKE[name](rate))
        right = of_dense(dense, MAKE[name](rate))
        if compiled:
            ours, right = tf.function(ours), tf.function(right)
        for ids in IDS:
            ours(tf.constant(ids))
            right(tf.constant(ids))
        np.testing.assert_allclose(rows_of(table), dense, atol=1e-5)


def test_a_frozen_table_keeps_its_optimizer(sok, table):
    """Steps that an optimizer makes without a variable count, as for a dense one."""
    dense, other, too = tf.Variable(START), tf.Variable([1.0]), tf.Variable([1.0])
    ours, right = sok.OptimizerWrapper(keras.Adam(0.1)), keras.Adam(0.1)
    for optimizer, variables in ((ours, [table, other]), (right, [dense, too])):
        if hasattr(optimizer, "build"):
            optimizer.build(variables)
    for ids, frozen in zip(IDS, (False, True, False), strict=True):
        for optimizer, variables, lookup in (
            (ours, [table, other], lambda ids: tf.gather(table, ids)),
            (right, [dense, too], lambda ids: tf.one_hot(ids, 3) @ dense),
        ):
            trained = variables[1:] if frozen else variables
            with tf.GradientTape() as tape:
                loss = tf.reduce_sum(variables[1] * lookup(ids))
            optimizer.apply_gradients(zip(tape.gradient(loss, trained), trained, strict=True))
    np.testing.assert_allclose(rows_of(table), dense, atol=1e-5)


def test_policies_keep_what_they_know_of_keys(sok):
    option = sok.EmbeddingVariableOption(filter_option=sok.CounterFilter(filter_freq=2))
    table = sok.EmbeddingVariable(2, name="counted", ev_option=option)
    for rate in (0.1, 0.2):
        step = of_table(sok, table, keras.Adam(rate))
        step(tf.constant([5, 6]))
        step(tf.constant([6, 7]))
    assert sorted(sok.export(table)[0].numpy().tolist()) == [5, 6, 7]
    frequencies = dict(zip([5, 6, 7], table.get_frequency([5, 6, 7]).numpy().tolist(), strict=True))
    assert frequencies == {5: 2, 6: 4, 7: 2}


@pytest.mark.parametrize("compiled", [False, True])
def test_back_to_an_earlier_optimizer(sok, table, compiled):
    first, second = (of_table(sok, table, keras.Adam(0.1)) for _ in range(2))
    if compiled:
        first, second = tf.function(first), tf.function(second)
    ids = [tf.constant(step) for step in IDS]
    first(ids[0])
    second(ids[0])
    second(ids[1])
    before = rows_of(table)
    error = tf.errors.InvalidArgumentError if compiled else RuntimeError
    with pytest.raises(error, match="(?s)owned.*one optimizer at a time.*taken the table"):
        first(ids[1])
    np.testing.assert_array_equal(rows_of(table), before)


@pytest.mark.parametrize("inner", [False, True])
def test_two_in_one_function(sok, table, inner):
    steps = [of_table(sok, table, keras.Adam(0.1)) for _ in range(2)]
    steps = [tf.function(step) for step in steps] if inner else steps

    @tf.function
    def both(ids):
        for step in steps:
            step(ids)

    with pytest.raises(RuntimeError, match="in a function or graph in which another"):
        both(tf.constant(IDS[0]))


def test_two_in_a_session(sok):
    with tf.Graph().as_default():
        table = sok.EmbeddingVariable(2, name="session")
        loss = tf.reduce_sum(tf.gather(table, tf.constant([1, 2])))
        adam = tf.compat.v1.train.AdamOptimizer
        first, second = (sok.OptimizerWrapper(adam(rate)) for rate in (0.1, 0.2))
        first.minimize(loss, var_list=[table])
        with pytest.raises(RuntimeError, match="'session'.*in a function or graph"):
            second.minimize(loss, var_list=[table])


def test_gradient_descent_keeps_nothing_and_shares(sok, table):
    dense = tf.Variable(START)
    ours = [of_table(sok, table, keras.SGD(rate)) for rate in (0.1, 0.2)]
    right = [of_dense(dense, keras.SGD(rate)) for rate in (0.1, 0.2)]
    for ids in IDS:
        for step in (*ours, *right):
            step(ids)
    np.testing.assert_allclose(rows_of(table), dense, atol=1e-5)
