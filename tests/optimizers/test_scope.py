"""`sok.OptimizerScope`: stock optimizers train tables within it, as they train dense variables."""

import numpy as np
import pytest
import tensorflow as tf

import sok_like
from sok_like.runtime.framework.running_keras import is_keras_3
from tests.core import oracles
from tests.training import train_step

pytestmark = pytest.mark.keras

STEPS = ([3, 1, 3], [2], [1, 2, 4])
ROWS = np.linspace(-1, 1, 20).astype(np.float32).reshape(5, 4)
legacy = pytest.mark.skipif(is_keras_3(), reason="an optimizer of tf_keras")


def keras(name, **arguments):
    return lambda: getattr(tf.keras.optimizers, name)(0.1, **arguments)


def compat(name, **arguments):  # under tf_keras its legacy optimizers
    return lambda: getattr(tf.compat.v1.keras.optimizers, name)(0.1, **arguments)


def v1(name):
    return lambda: getattr(tf.compat.v1.train, name)(0.1)


OPTIMIZERS = [
    pytest.param(keras("Adam"), id="keras adam"),
    pytest.param(compat("SGD"), id="compat sgd"),
    pytest.param(compat("SGD", momentum=0.9), id="compat momentum", marks=legacy),
    pytest.param(compat("SGD", momentum=0.9, nesterov=True), id="compat nesterov", marks=legacy),
    pytest.param(compat("Adam", beta_1=0.8, clipvalue=1.5), id="compat adam"),
    pytest.param(compat("Adam", amsgrad=True), id="compat amsgrad", marks=legacy),
    pytest.param(v1("AdamOptimizer"), id="v1 adam"),
]


def dense_oracle(optimizer):
    """The same steps of the stock optimizer on an ordinary variable."""
    rows = tf.Variable(ROWS)
    for keys in STEPS:
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(tf.gather(rows, keys) ** 2)
        # Keras 3 would square the parts of a row's gradient one by one.
        gradient = tf.convert_to_tensor(tape.gradient(loss, rows))
        keys = np.unique(keys)
        gradient = tf.IndexedSlices(tf.gather(gradient, keys), tf.constant(keys), [5, 4])
        optimizer.apply_gradients([(gradient, rows)])
    return rows.numpy()


def a_table(sok):
    layer = sok.All2AllDenseEmbedding(None, 4, 1, 1, dynamic_input=True)
    return layer, sok.assign(layer.embedding_variable, np.arange(5), ROWS)


@pytest.mark.parametrize("make", OPTIMIZERS)
def test_a_stock_optimizer_moves_rows_as_it_moves_a_dense_variable(sok, make):
    layer, _ = a_table(sok)
    optimizer = make()

    @tf.function(reduce_retracing=True)
    def step(keys):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(layer(keys) ** 2)
        gradients = tape.gradient(loss, layer.trainable_variables)
        with sok.OptimizerScope(layer.trainable_variables):
            optimizer.apply_gradients(zip(gradients, layer.trainable_variables, strict=True))

    for keys in STEPS:
        step(tf.constant(keys, tf.int64))
    rows, _ = layer.table.find(np.arange(5))
    np.testing.assert_allclose(rows, dense_oracle(make()), rtol=1e-4, atol=5e-6)


@pytest.mark.parametrize("make", [p for p in OPTIMIZERS if "adam" in p.id])
def test_in_a_v1_graph_with_ordinary_variables(sok, make):
    with tf.Graph().as_default(), tf.compat.v1.Session() as session:
        layer, assigned = a_table(sok)
        kernel = tf.Variable(np.ones([4, 1], np.float32), name="kernel")
        keys = tf.compat.v1.placeholder(tf.int64, [None])
        loss = tf.reduce_sum(layer(keys) ** 2) + tf.reduce_sum(kernel**2)
        variables = [layer.table, kernel]
        gradients = tf.gradients(loss, variables)
        optimizer = make()
        with sok.OptimizerScope(variables):
            train = optimizer.apply_gradients(zip(gradients, variables, strict=True))
        session.run(tf.compat.v1.global_variables_initializer())
        session.run(assigned)
        for step in STEPS:
            session.run(train, {keys: step})
        rows = session.run(layer.table.find(np.arange(5))[0])
        kernel = session.run(kernel)
    np.testing.assert_allclose(rows, dense_oracle(make()), rtol=1e-4, atol=5e-6)
    expected, optimizer = tf.Variable(np.ones([4, 1], np.float32)), make()
    for _ in STEPS:
        train_step(optimizer, expected, lambda: tf.reduce_sum(expected**2))
    np.testing.assert_allclose(kernel, expected, rtol=1e-5)


def test_outside_the_scope_a_stock_optimizer_is_as_it_was(sok):
    layer, _ = a_table(sok)
    classes = [tf.keras.optimizers.Optimizer, tf.compat.v1.train.Optimizer]
    before = [cls.__dict__.get("apply_gradients") for cls in classes]
    variables = layer.trainable_variables
    gradient = tf.IndexedSlices(tf.ones([1, 4]), tf.constant([3], tf.int64))
    with sok.OptimizerScope(variables), pytest.raises(KeyError), sok.OptimizerScope(variables):
        raise KeyError
    assert [cls.__dict__.get("apply_gradients") for cls in classes] == before
    with pytest.raises(NotImplementedError, match="sok.OptimizerWrapper"):
        tf.keras.optimizers.SGD(0.1).apply_gradients([(gradient, variables[0])])


def test_one_optimizer_for_tables_first_and_ordinary_variables_then(sok):
    """What SOK 1.x's example of mixed precision does."""
    layer, _ = a_table(sok)
    kernel = tf.keras.layers.Dense(1, kernel_initializer="ones", use_bias=False)
    kernel.build([None, 4])
    optimizer = tf.keras.optimizers.Adam(0.1)
    others = kernel.trainable_variables
    gradient = tf.IndexedSlices(tf.ones([1, 4]), tf.constant([3], tf.int64))
    for _ in range(2):
        with sok.OptimizerScope(layer.trainable_variables):
            optimizer.apply_gradients(
                [(gradient, layer.embedding_variable)], experimental_aggregate_gradients=False
            )
        optimizer.apply_gradients([(tf.ones([4, 1]), others[0])])
    assert int(np.asarray(optimizer.iterations)) == 4  # as Keras counts: one for each call
    oracle = oracles.Adam(np.ones([4, 1]))
    for step in (2, 4):  # are the kernel's
        oracle.step(step, 0.1, np.arange(4), np.ones([4, 1]))
    np.testing.assert_allclose(others[0], oracle.w, rtol=1e-4)


@pytest.mark.parametrize("received", [None, iter([]), "v"])
def test_the_scope_wants_a_list_or_a_tuple(sok, received):
    with pytest.raises(RuntimeError, match="`trainable_variables` must be a list or a tuple.*Rec"):
        sok.OptimizerScope(received)


OURS = lambda: sok_like.optimizers.Adam(0.1)  # noqa: E731


@legacy
@pytest.mark.parametrize("make", [keras("SGD"), compat("SGD"), OURS])
def test_a_fixed_loss_scale_in_a_v1_graph(sok, make):
    """SOK 1.x's `sok.tf.keras.mixed_precision.LossScaleOptimizer(optimizer, 1024)`."""
    results = []
    for scale in (1024, None):
        with tf.Graph().as_default(), tf.compat.v1.Session() as session:
            layer, assigned = a_table(sok)
            optimizer = make()
            if scale:
                optimizer = sok.tf.keras.mixed_precision.LossScaleOptimizer(optimizer, scale)
            loss = tf.reduce_sum(layer(tf.constant([3, 1], tf.int64)) ** 2)
            scaled = optimizer.get_scaled_loss(loss) if scale else loss
            gradients = tf.gradients(scaled, [layer.table])
            if scale:
                assert scaled is not loss
                gradients = optimizer.get_unscaled_gradients(gradients)
            with sok.OptimizerScope([layer.table]):
                train = optimizer.apply_gradients(zip(gradients, [layer.table], strict=True))
            session.run(tf.compat.v1.global_variables_initializer())
            if hasattr(optimizer, "initializer"):
                session.run(optimizer.initializer)
            session.run(assigned)
            for _ in range(3):
                session.run(train)
            results.append(session.run(layer.table.find(np.arange(5))[0]))
    assert np.abs(results[0] - ROWS).max() > 0.1
    np.testing.assert_allclose(*results, rtol=1e-5)


def test_a_fixed_loss_scale_is_for_tf_keras(sok):
    optimizer = tf.keras.optimizers.SGD(0.1)
    scaling = sok.tf.keras.mixed_precision.LossScaleOptimizer
    if is_keras_3():
        with pytest.raises(NotImplementedError, match="TF_USE_LEGACY_KERAS=1"):
            scaling(optimizer, 1024)
        return
    assert float(scaling(optimizer, np.int64(1024)).loss_scale) == 1024
    assert scaling(tf.keras.optimizers.SGD(0.1)).dynamic
    for scale in ("fixed", 0.5):
        with pytest.raises(ValueError, match="`loss_scale` must be .*Received: loss_scale="):
            scaling(optimizer, scale)
