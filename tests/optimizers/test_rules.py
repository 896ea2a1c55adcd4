"""Each stock optimizer's setting, fused, against the optimizer itself on a dense variable."""

import functools
import itertools

import numpy as np
import pytest
import tensorflow as tf

from sok_like.runtime.framework.running_keras import is_keras_3
from tests.core import oracles
from tests.training import apply_gradient

pytestmark = pytest.mark.keras

KEYS = np.array([3, -1, 2**40, 0, 17, 99, -(2**63), 8], np.int64)
DIM, STEPS, RATE = 3, 12, 0.02
v1 = tf.compat.v1.train
keras = tf.keras.optimizers
compat = tf.compat.v1.keras.optimizers  # under tf_keras its legacy optimizers
legacy = pytest.mark.skipif(is_keras_3(), reason="an optimizer of tf_keras")
keras_3 = pytest.mark.skipif(not is_keras_3(), reason="tf_keras has nothing like it")


def schedule():
    return keras.schedules.ExponentialDecay(0.05, 5, 0.7)


DENSE = {  # every row of the oracle's dense variable gets a gradient, be it zero
    "sgd": lambda: keras.SGD(RATE),
    "sgd schedule": lambda: keras.SGD(schedule()),
    "sgd weight decay": lambda: keras.SGD(RATE, weight_decay=0.1),
    "sgd clipvalue": lambda: keras.SGD(RATE, clipvalue=0.3),
    "momentum": lambda: keras.SGD(RATE, momentum=0.9),
    "momentum schedule": lambda: keras.SGD(schedule(), momentum=0.9),
    "nesterov": lambda: keras.SGD(RATE, momentum=0.8, nesterov=True),
    "nesterov as a number": lambda: keras.SGD(RATE, momentum=0.8, nesterov=1),
    "adagrad": lambda: keras.Adagrad(RATE),
    "adagrad settings": lambda: keras.Adagrad(RATE, initial_accumulator_value=0.5, epsilon=1e-3),
    "adam": lambda: keras.Adam(RATE),
    "adam settings": lambda: keras.Adam(RATE, beta_1=0.7, beta_2=0.95, epsilon=1e-4),
    "adam schedule": lambda: keras.Adam(schedule()),
    "adam weight decay": lambda: keras.Adam(RATE, weight_decay=0.1),
    "adam clipvalue": lambda: keras.Adam(RATE, clipvalue=0.3),
    "amsgrad": lambda: keras.Adam(RATE, amsgrad=True),
    "amsgrad as a number": lambda: keras.Adam(RATE, amsgrad=1),
    "adamw": lambda: keras.AdamW(RATE, weight_decay=0.2),
    "v1 adam": lambda: v1.AdamOptimizer(RATE),
    "v1 adam settings": lambda: v1.AdamOptimizer(RATE, beta1=0.7, beta2=0.95, epsilon=1e-4),
}
SPARSE = {  # the oracle's sparse kernels leave other rows alone
    "v1 sgd": lambda: v1.GradientDescentOptimizer(RATE),
    "v1 momentum": lambda: v1.MomentumOptimizer(RATE, 0.9),
    "v1 nesterov": lambda: v1.MomentumOptimizer(RATE, 0.8, use_nesterov=True),
    "v1 adagrad": lambda: v1.AdagradOptimizer(RATE, initial_accumulator_value=0.3),
    "v1 ftrl": lambda: v1.FtrlOptimizer(RATE),
    "v1 ftrl settings": lambda: v1.FtrlOptimizer(RATE, **FTRL),
}
FTRL = {
    "learning_rate_power": -0.6,
    "initial_accumulator_value": 0.2,
    "l1_regularization_strength": 0.02,
    "l2_regularization_strength": 0.1,
    "l2_shrinkage_regularization_strength": 0.05,
    "beta": 0.3,
}


LAZY_ADAM = {"beta_1": 0.8, "beta_2": 0.99, "epsilon": 1e-6}
LAZY = {  # of the package; the oracle of each
    "v1": lambda sok: sok.tf.keras.optimizers.LazyAdamOptimizer(RATE, *LAZY_ADAM.values()),
    "keras": lambda sok: sok.optimizers.LazyAdam(RATE, **LAZY_ADAM),
    "wrapped": lambda sok: sok.OptimizerWrapper(keras.Adam(RATE, **LAZY_ADAM), lazy=True),
    "momentum": lambda sok: sok.OptimizerWrapper(keras.SGD(RATE, momentum=0.9), lazy=True),
}
lazy_adam = functools.partial(oracles.Adam, **LAZY_ADAM, lazy=True)
lazy_momentum = functools.partial(oracles.Momentum, momentum=0.9, lazy=True)


def gradients(steps=STEPS):
    """Per step, positions and values of a gradient; positions repeat, and some steps have none.

    Position 0 is there at the first and the last step only, the last position never.
    """
    rng = np.random.default_rng(4)
    for step in range(steps):
        present = np.flatnonzero(rng.random(len(KEYS) - 1) < 0.5)
        present = present[present != 0] if 0 < step < steps - 1 else np.append(present, 0)
        positions = np.append(present, present[:2]) if step % 10 != 5 else present[:0]
        yield positions, rng.uniform(-1, 1.5, [len(positions), DIM]).astype(np.float32)


def make_variable(sok, capacity=None):
    variable = sok.EmbeddingVariable(DIM, name="rows", capacity=capacity)
    return variable, variable.find(KEYS)[0].numpy()


def embedding_gradient(positions, values):
    return tf.IndexedSlices(tf.constant(values), tf.constant(KEYS[positions]), [2**31 - 1, DIM])


def dense_gradient(positions, values, dtype=np.float64):
    dense = np.zeros([len(KEYS), DIM], dtype)
    np.add.at(dense, positions, values)
    return tf.constant(dense)


def follow(sok, optimizer, take_step):
    """Trains a table; `take_step(positions, values)` does the same on rows that it returns."""
    variable, initial = make_variable(sok)
    step, seen = take_step(initial), set()
    for positions, values in gradients():
        optimizer.apply_gradients([(embedding_gradient(positions, values), variable)])
        expected = step(positions, values)
        seen.update(positions.tolist())
    np.testing.assert_allclose(variable.find(KEYS)[0], expected, rtol=0, atol=1e-5)
    keys, rows = (t.numpy() for t in sok.export(variable))
    assert set(keys.tolist()) == set(KEYS[sorted(seen)].tolist())
    for key, row in zip(keys, rows, strict=True):
        np.testing.assert_allclose(row, expected[KEYS == key][0], rtol=0, atol=1e-5)
    return variable


def of_dense(stock, dtype=tf.float64, sparse=False):
    """Steps of a stock optimizer on a dense variable."""

    def start(initial):
        dense = tf.Variable(initial, dtype=dtype)

        def step(positions, values):
            gradient = dense_gradient(positions, values, dtype.as_numpy_dtype)
            if sparse:
                gradient = tf.IndexedSlices(tf.constant(values), tf.constant(positions))
            stock.apply_gradients([(gradient, dense)])
            return dense.numpy()

        return step

    return start


def of_oracle(make_oracle, rate):
    """Steps of one of the core's oracles."""

    def start(initial):
        oracle, numbers = make_oracle(initial), itertools.count(1)

        def step(positions, values):
            oracle.step(next(numbers), rate, positions, values)
            return oracle.w

        return step

    return start


@pytest.mark.parametrize("name", DENSE)
def test_dense_meaning(sok, name):
    # v1's optimizers keep float32 beta powers, which a float64 variable would not make better.
    dtype = tf.float32 if name.startswith("v1") else tf.float64
    follow(sok, sok.OptimizerWrapper(DENSE[name]()), of_dense(DENSE[name](), dtype))


@pytest.mark.parametrize("name", [*SPARSE, "keras ftrl"])
def test_sparse_meaning(sok, name):
    # Keras' FTRL follows TF's sparse kernels, so those are its oracle.
    stock_of = SPARSE["v1 ftrl settings" if name == "keras ftrl" else name]
    ours = keras.Ftrl(RATE, **FTRL) if name == "keras ftrl" else stock_of()
    follow(sok, sok.OptimizerWrapper(ours), of_dense(stock_of(), tf.float32, sparse=True))


@pytest.mark.parametrize("name", LAZY)
def test_lazy_meaning(sok, name):
    oracle = lazy_momentum if name == "momentum" else lazy_adam
    follow(sok, LAZY[name](sok), of_oracle(oracle, RATE))


def test_lazy_adam_of_ordinary_variables(sok):
    """Of sparse gradients it changes the rows that they have; dense ones follow Adam."""
    rows = np.random.default_rng(0).random([len(KEYS), DIM]).astype(np.float32)
    sparse, oracle, optimizer = tf.Variable(rows), lazy_adam(rows), LAZY["v1"](sok)
    dense, right = tf.Variable([1.0, 2.0]), tf.Variable([1.0, 2.0])
    stock = v1.AdamOptimizer(RATE, *LAZY_ADAM.values())
    batches = [batch for batch in gradients() if len(batch[0])]
    for step, (positions, values) in enumerate(batches, 1):
        of_rows = tf.IndexedSlices(values, positions, rows.shape)
        optimizer.apply_gradients([(of_rows, sparse), (tf.constant([1.0, step - 2.0]), dense)])
        oracle.step(step, RATE, positions, values)
        stock.apply_gradients([(tf.constant([1.0, step - 2.0]), right)])
    np.testing.assert_allclose(sparse, oracle.w, rtol=0, atol=1e-5)
    np.testing.assert_allclose(dense, right, rtol=1e-6)


def test_a_learning_rate_set_between_steps_counts(sok):
    variable, initial = make_variable(sok)
    ours, stock = sok.OptimizerWrapper(keras.Adam(0.1)), keras.Adam(0.1)
    dense = tf.Variable(initial, dtype=tf.float64)
    for step, (positions, values) in enumerate(gradients()):
        ours.learning_rate = stock.learning_rate = 0.1 / (step + 1)
        ours.apply_gradients([(embedding_gradient(positions, values), variable)])
        stock.apply_gradients([(dense_gradient(positions, values), dense)])
    np.testing.assert_allclose(variable.find(KEYS)[0], dense, rtol=0, atol=1e-5)


# ---- settings that a single row cannot follow, and what is no optimizer ----


INFINITE, BETA = float("inf"), tf.constant(0.9)


@pytest.mark.parametrize(
    "make, words",
    [
        (lambda: keras.Adam(RATE, clipnorm=1.0), "cannot honour `clipnorm`.*Received: clipnorm="),
        (lambda: keras.SGD(RATE, global_clipnorm=1.0), "cannot honour `global_clipnorm`.*Received"),
        (lambda: keras.Adam(RATE, use_ema=True), "cannot honour `use_ema`"),
        (lambda: keras.RMSprop(), "supports Keras' SGD, Adagrad, Adam.*Received: .*RMS"),
        (lambda: v1.RMSPropOptimizer(0.1), "supports Keras' SGD, Adagrad, Adam.*Received: .*RMS"),
        (lambda: v1.AdamOptimizer(0.1, BETA), "`beta1` must be a number, fixed for the whole tra"),
        (lambda: None, "An optimizer of Keras 3, tf_keras or .*is required. Received"),
        (lambda: 0.1, "is required. Received"),
        (lambda: tf.Module(), "is required. Received"),
        (lambda: keras.Adam(0.1, beta_1=2.0), "`beta_1` must be .*Received: "),
        (lambda: keras.Adam(0.1, beta_2=-1.0), "`beta_2` must be .*Received: "),
        (lambda: v1.MomentumOptimizer(0.1, 1.5), "`momentum` must be .*Received: "),
        (lambda: keras.Adagrad(0.1, INFINITE), "`initial_accumulator` must be .*Received: "),
        pytest.param(
            lambda: keras.Adam(RATE, gradient_accumulation_steps=2),
            "cannot honour `gradient_accumulation_steps`",
            marks=keras_3,
        ),
        pytest.param(lambda: compat.Adagrad(0.1), "support SGD and.*: .*Adagrad", marks=legacy),
        pytest.param(lambda: compat.SGD(0.1, clipnorm=1.0), "`clipnorm`.*on SGD", marks=legacy),
    ],
)
def test_refused(sok, make, words):
    error = TypeError if "is required" in words else ValueError
    with pytest.raises(error, match=words):
        sok.OptimizerWrapper(make())


def test_momentum_of_v1_has_its_slot_at_0(sok):
    """As in TensorFlow, so that a program with another momentum may go on."""
    table = sok.EmbeddingVariable(2, name="users")
    apply_gradient(sok.OptimizerWrapper(v1.MomentumOptimizer(0.1, 0.0)), table, [1])
    np.testing.assert_array_equal(table.snapshot().slot_rows, [[1, 1]])


def test_numbers_out_of_range_of_our_own_classes(sok):
    for make in (
        lambda: sok.tf.keras.optimizers.Adam(beta_1=2.0),
        lambda: sok.optimizers.LazyAdam(beta_1=2.0),
        lambda: sok.tf.keras.optimizers.lazy_adam.LazyAdamOptimizer(beta1=2.0),
    ):
        with pytest.raises(ValueError, match="`beta_1` must be .*Received: 2"):
            make()
    for name, words in (("epsilon", "epsilon"), ("initial_accumulator_value", "initial_acc")):
        with pytest.raises(ValueError, match=words):
            sok.optimizers.RowWiseAdagrad(**{name: -1.0})


@pytest.mark.parametrize("stock", [keras.SGD, compat.Adam, v1.AdagradOptimizer])
def test_subclasses_with_an_update_of_their_own(sok, stock):
    class Defaults(stock):
        def __init__(self):
            super().__init__(0.5)

        def get_config(self):
            return super().get_config()

    class Own(Defaults):
        def apply_gradients(self, grads_and_vars, *args, **kwargs):
            return super().apply_gradients([(2 * g, v) for g, v in grads_and_vars])

    sok.OptimizerWrapper(Defaults())
    with pytest.raises(ValueError, match=r"formula of .*Own, which overrides apply_gradients"):
        sok.OptimizerWrapper(Own())


@keras_3
def test_a_subclass_of_our_optimizer_may_override_apply(sok):
    class Own(sok.tf.keras.optimizers.Adam):
        def apply(self, grads, trainable_variables=None):
            self.learning_rate = 0.25
            return super().apply(grads, trainable_variables)

    table, dense = sok.EmbeddingVariable(2, name="own", initializer="zeros"), tf.Variable([1.0])
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(tf.nn.embedding_lookup(table, [5])) + dense[0]
    gradients = tape.gradient(loss, [table, dense])
    optimizer = Own(0.5)
    optimizer.apply_gradients(zip(gradients, [table, dense], strict=True))
    # Adam's first step moves each element by the learning rate.
    np.testing.assert_allclose(table.find([5])[0], [[-0.25, -0.25]], rtol=1e-4)
    np.testing.assert_allclose(dense, [0.75], rtol=1e-4)


@pytest.mark.parametrize("wrapper", ["OptimizerWrapper", "DistributedOptimizer"])
def test_horovods_optimizer(sok, wrapper):
    hvd = pytest.importorskip("horovod.tensorflow")
    wrap = getattr(sok if wrapper == "OptimizerWrapper" else sok.dist_model_parallel, wrapper)
    with pytest.raises((TypeError, ValueError), match=r"averages .*Received: horovod\..*SGD"):
        wrap(hvd.DistributedOptimizer(keras.SGD(0.1)))
