"""`OptimizerWrapper` and `SGD` against the same stock optimizer on a dense variable."""

import functools

import numpy as np
import pytest
import tensorflow as tf
import tf_keras

import sok_like
from sok_like import sok2
from tests.training import train_step

pytestmark = pytest.mark.keras
legacy = tf_keras.optimizers.legacy
v1 = tf.compat.v1

ROWS, DIM = 6, 4


class Signs(legacy.SGD):
    """Another formula than that of its class."""

    def _resource_apply_sparse(self, grad, var, indices, **kwargs):
        return super()._resource_apply_sparse(tf.sign(grad), var, indices, **kwargs)


# Their sparse kernels leave other rows alone, so batches may differ.
SPARSE = {
    "SGD": lambda: legacy.SGD(0.1),
    "momentum": lambda: legacy.SGD(0.1, momentum=0.9),
    "Adamax": lambda: legacy.Adamax(0.1),
    "Adadelta": lambda: legacy.Adadelta(1.0),
    "Adagrad": lambda: legacy.Adagrad(0.1),
    "Ftrl": lambda: legacy.Ftrl(0.1),
    "of the user's": lambda: Signs(0.1, momentum=0.9),
}
# Theirs decay what belongs to every row; here only rows of the batch do, as in SOK 2.x.
LAZY = {
    "Adam": lambda: legacy.Adam(0.1),
    "RMSprop": lambda: legacy.RMSprop(0.1, momentum=0.5),
    "Nadam": lambda: legacy.Nadam(0.1),
}


@pytest.fixture(autouse=True)
def _one_rank(sok):
    sok2.init(use_legacy_optimizer=False)


def start():
    return np.random.default_rng(2).normal(size=[ROWS, DIM]).astype(np.float32)


def steps(all_rows):
    rng = np.random.default_rng(6)
    for _ in range(5):
        keys = rng.integers(0, ROWS, 4) if not all_rows else rng.permutation(ROWS)
        yield tf.constant(keys), tf.constant(rng.normal(size=[len(keys), DIM]), tf.float32)


def loss_of(variables, keys, weights):
    return sum(tf.reduce_sum(tf.nn.embedding_lookup(v, keys) * weights) for v in variables)


def train(make, table, all_rows, as_function=False, wrapped=True):
    stock = make()
    optimizer = sok2.OptimizerWrapper(stock) if wrapped else stock

    def step(keys, weights):
        train_step(optimizer, table, lambda: loss_of([table], keys, weights))

    step = tf.function(step) if as_function else step
    for keys, weights in steps(all_rows):
        step(keys, weights)
    return optimizer


@pytest.mark.parametrize(
    "name, as_function", [(name, i % 2 == 0) for i, name in enumerate([*SPARSE, *LAZY])]
)
def test_legacy_optimizers_train_rows_as_they_do_those_of_a_variable(name, as_function):
    make, all_rows = {**SPARSE, **LAZY}[name], name in LAZY
    table = sok2.DynamicVariable(DIM, "0", "hbm", name=f"table_{name}")
    sok2.assign(table, np.arange(ROWS), start())
    dense = tf.Variable(start())
    optimizer = train(make, table, all_rows, as_function)
    stock = train(make, dense, all_rows, wrapped=False)
    np.testing.assert_allclose(sok2.export(table)[1], dense, rtol=2e-5, atol=1e-6)
    assert set(optimizer.get_slot_names()) == set(stock.get_slot_names())
    touched = sorted({key for keys, _ in steps(all_rows) for key in keys.numpy().tolist()})
    for slot in stock.get_slot_names():
        keys, values = (t.numpy() for t in sok2.export(optimizer.get_slot(table, slot)))
        assert set(touched) <= set(keys.tolist())
        expected = stock.get_slot(dense, slot).numpy()[keys]
        np.testing.assert_allclose(values, expected, rtol=2e-5, atol=1e-6)


@pytest.mark.parametrize("name", ["momentum", "Ftrl"])
def test_both_kinds_of_variables_in_one_step(name):
    table = sok2.DynamicVariable(DIM, "0.5", "hbm", name=f"both_{name}")
    static = sok2.Variable(np.full([ROWS, DIM], 0.5, np.float32))
    dense = tf.Variable(static)
    optimizer, stock = sok2.OptimizerWrapper(SPARSE[name]()), SPARSE[name]()
    for keys, weights in steps(False):
        for variables, by in (([table, static], optimizer), ([dense], stock)):
            train_step(by, variables, functools.partial(loss_of, variables, keys, weights))
    keys, rows = sok2.export(table)
    np.testing.assert_allclose(rows, dense.numpy()[keys], rtol=2e-5, atol=1e-6)
    np.testing.assert_allclose(static, dense, rtol=2e-5, atol=1e-6)
    assert int(optimizer.iterations) == 5


def test_adam_of_the_running_keras_moves_rows_of_the_batch_only():
    table = sok2.DynamicVariable(DIM, "1", "hbm", name="lazy")
    optimizer = sok2.OptimizerWrapper(tf.keras.optimizers.Adam(0.1))
    m, v, rows = np.zeros(2), np.zeros(2), np.ones(2)
    for step, keys in enumerate(([0, 1], [1], [1]), 1):
        train_step(optimizer, table, lambda k=keys: tf.reduce_sum(3 * table.sparse_read(k)))
        m[keys] = 0.9 * m[keys] + 0.1 * 3
        v[keys] = 0.999 * v[keys] + 0.001 * 9
        rate = 0.1 * np.sqrt(1 - 0.999**step) / (1 - 0.9**step)
        rows[keys] -= rate * m[keys] / (np.sqrt(v[keys]) + 1e-7)
    np.testing.assert_allclose(sok2.export(table)[1][:, 0], rows, rtol=1e-5)
    np.testing.assert_allclose(sok2.export(optimizer.get_slot(table, "m"))[1][:, 0], m, rtol=1e-5)
    assert float(optimizer.lr) == pytest.approx(0.1)


@pytest.mark.parametrize(
    "make", [lambda: legacy.Adamax(0.1), lambda: tf.keras.optimizers.Adam(0.1)]
)
def test_the_optimizer_by_itself_and_wrapped_count_their_own_steps(make):
    table, dense = sok2.DynamicVariable(2, "1", "hbm"), tf.Variable([[1.0, 1.0]])
    optimizer = make()
    wrapped = sok2.OptimizerWrapper(optimizer)
    for _ in range(3):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(table.sparse_read([0])) + tf.reduce_sum(dense)
        gradients = tape.gradient(loss, [table, dense])
        wrapped.apply_gradients([(gradients[0], table)])
        optimizer.apply_gradients([(gradients[1], dense)])
    # Gradients are 1, so each step moves by the rate.
    np.testing.assert_allclose(sok2.export(table)[1], np.full([1, 2], 0.7), rtol=1e-5)
    np.testing.assert_allclose(dense, np.full([1, 2], 0.7), rtol=1e-5)
    assert (int(wrapped.iterations), int(optimizer.iterations)) == (3, 3)


def test_slots_of_a_rule_are_assigned():
    table = sok2.DynamicVariable(2, "1", "hbm")
    optimizer = sok2.OptimizerWrapper(tf.keras.optimizers.SGD(1.0, momentum=0.5))
    momentum = optimizer.get_slot(table, "momentum")
    table.sparse_read([4, 5])
    assert sok2.export(momentum)[1].numpy().tolist() == [[0, 0], [0, 0]]
    sok2.assign(momentum, [5], [[-2.0, -2.0]])
    train_step(optimizer, table, lambda: tf.reduce_sum(table.sparse_read([4, 5])))
    # momentum = 0.5 momentum - gradient; row += momentum
    assert sok2.export(table)[1].numpy()[:, 0].tolist() == [0, -1]


def test_sgd():
    table, static = sok2.DynamicVariable(2, "1", "hbm"), sok2.Variable(np.ones([3, 2], np.float32))
    optimizer, step = sok2.SGD(0.5), tf.Variable(0, dtype=tf.int64)
    with tf.GradientTape() as tape:
        loss = sum(tf.reduce_sum(tf.nn.embedding_lookup(v, [1, 1])) for v in (table, static))
    gradients = tape.gradient(loss, [table, static])
    optimizer.apply_gradients(zip(gradients, [table, static], strict=True), step)
    assert sok2.export(table)[1].numpy().tolist() == [[0, 0]] and int(step) == 1
    assert static.numpy()[:, 0].tolist() == [1, 0, 1]
    optimizer.lr.assign(0.25)
    optimizer.apply_gradients([(gradients[0], table)])
    assert sok2.export(table)[1].numpy().tolist() == [[-0.5, -0.5]]
    with pytest.raises(TypeError, match="variables of sok2"):
        optimizer.apply_gradients([(gradients[1], tf.Variable(np.ones([3, 2])))])
    with pytest.raises(ValueError, match="No gradients"):
        optimizer.apply_gradients([(None, table)])


def test_in_a_session():
    with tf.Graph().as_default():
        table = sok2.DynamicVariable(2, "1", "hbm", name="session")
        step = v1.train.get_or_create_global_step()
        optimizer = sok2.OptimizerWrapper(v1.train.AdagradOptimizer(0.5))
        rows = sok2.all2all_dense_embedding(table, [3, 8])
        (gradient,) = tf.gradients(tf.reduce_sum(2 * rows), [table])
        train = optimizer.apply_gradients([(gradient, table)], global_step=step)
        with v1.Session() as session:
            session.run(v1.global_variables_initializer())
            for _ in range(2):
                session.run(train)
            keys, rows = session.run(sok2.export(table))
            assert session.run(step) == 2
    expected = 1 - 0.5 * 2 / np.sqrt(0.1 + 4) - 0.5 * 2 / np.sqrt(0.1 + 8)
    assert keys.tolist() == [3, 8]
    np.testing.assert_allclose(rows, np.full([2, 2], expected), rtol=1e-5)


@pytest.mark.parametrize("name", ["lr", "learning_rate"])
def test_a_learning_rate_that_is_set_counts(name):
    stock = sok2.OptimizerWrapper(tf.keras.optimizers.SGD(1.0))
    legacy_one = sok2.OptimizerWrapper(legacy.Adamax(1.0))
    for optimizer in (stock, legacy_one, sok2.SGD(1.0)):
        setattr(optimizer, name, 0.25)
        assert float(optimizer.learning_rate) == float(optimizer.lr) == 0.25
        table = sok2.DynamicVariable(1, "1", "hbm")
        train_step(optimizer, table, lambda t=table: tf.reduce_sum(t.sparse_read([0])))
        np.testing.assert_allclose(sok2.export(table)[1], [[0.75]], rtol=1e-5)
        with pytest.raises(AttributeError):
            optimizer.weight_decay = 0.1  # nobody would read it
    with pytest.raises(AttributeError, match="tf.compat.v1.train"):
        setattr(sok2.OptimizerWrapper(v1.train.AdamOptimizer(0.1)), name, 0.25)


def test_what_no_session_would_do_raises():
    with tf.Graph().as_default():
        with pytest.raises(RuntimeError, match="lr.assign"):
            sok2.SGD(1.0).lr = 0.25
        table = sok2.DynamicVariable(2, "1", "hbm", name="slots_in_a_graph")
        slot = sok2.OptimizerWrapper(v1.train.AdagradOptimizer(0.5)).get_slot(table, "accumulator")
        with pytest.raises(RuntimeError, match="'slots_in_a_graph'"):
            sok2.export(slot)


def test_what_rows_cannot_follow_raises():
    with pytest.raises(ValueError, match="tf_keras.optimizers.legacy"):
        sok2.OptimizerWrapper(tf.keras.optimizers.Adamax(0.1))
    with pytest.raises(ValueError, match="clipnorm"):
        sok2.OptimizerWrapper(legacy.Adagrad(0.1, clipnorm=1.0))
    with pytest.raises(TypeError, match="optimizer"):
        sok2.OptimizerWrapper(sok2.SGD(0.1))
    table = sok2.DynamicVariable(2, "1", "hbm")
    optimizer = sok2.OptimizerWrapper(legacy.Adagrad(0.1))
    with pytest.raises(ValueError, match="No gradients"):
        optimizer.apply_gradients([(None, table)])
    with pytest.raises(TypeError, match="IndexedSlices"):
        optimizer.apply_gradients([(tf.ones([1, 2]), table)])
    with pytest.raises(ValueError, match="`name` must be one of"):
        optimizer.get_slot(table, "momentum")
    with pytest.raises(TypeError, match="filter_variables"):
        optimizer.apply_gradients([(tf.ones([1, 2]), tf.Variable([[1.0, 2.0]]))])


@pytest.mark.parametrize("bare", [False, True])
def test_a_model_lists_both_kinds(bare):
    class Model(tf.keras.Model):
        def __init__(self):
            super().__init__()
            rows = sok2.Variable(np.ones([4, 2], np.float32), name="static")
            table = sok2.DynamicVariable(2, "1", "hbm", name="dynamic")
            self.rows = rows if bare else rows.as_weight()
            self.table = table if bare else table.as_weight()
            self.dense = tf.keras.layers.Dense(1, use_bias=False, kernel_initializer="ones")

        def call(self, ids):
            ids = tf.RaggedTensor.from_tensor(ids)
            rows = sok2.lookup_sparse([self.rows, self.table], [ids, ids], combiners="sum")
            return self.dense(tf.concat(rows, 1))

    model, ids = Model(), tf.constant([[1, 3]], tf.int64)
    optimizer, stock = sok2.OptimizerWrapper(tf.keras.optimizers.SGD(0.5)), tf.keras.optimizers
    plain = stock.SGD(0.5)
    model(ids)
    ours, others = sok2.filter_variables(iter(model.trainable_variables))
    assert (len(ours), len(others)) == (2, 1) and others[0] is model.dense.kernel
    with tf.GradientTape(persistent=True) as tape:
        loss = tf.reduce_sum(model(ids))
    optimizer.apply_gradients(zip(tape.gradient(loss, ours), ours, strict=True))
    plain.apply_gradients(zip(tape.gradient(loss, others), others, strict=True))
    found = sok2.all2all_dense_embedding(model.rows, [0, 1, 3]).numpy()
    assert found[:, 0].tolist() == [1, 0.5, 0.5]
    assert sok2.export(model.table)[1].numpy()[:, 0].tolist() == [0.5, 0.5]


def test_a_layer_that_does_not_list_a_variable_raises():
    variable = sok2.Variable(np.ones([4, 2], np.float32), name="outside")

    class Layer(tf.keras.layers.Layer):
        def call(self, ids):
            return sok2.all2all_dense_embedding(variable, ids)

    with pytest.raises(RuntimeError, match="does not list it"):
        Layer()(tf.constant([1], tf.int64))


@pytest.mark.skipif(not hasattr(tf.keras, "__internal__"), reason="Keras 3 has none")
def test_init_switches_to_the_legacy_optimizers_as_in_2_x():
    """Steps of momentum have other numbers there; the oracle is the legacy class itself."""
    stock, dense = tf.keras.optimizers.SGD, tf.Variable(start())
    try:
        for _ in range(2):  # cells of a notebook
            sok2.init()
        for name in ("SGD", "Adam", "Ftrl", "Optimizer"):
            assert getattr(tf.optimizers, name) is getattr(tf.keras.optimizers.legacy, name)
        assert tf_keras.optimizers.SGD is stock is not legacy.SGD
        table = sok2.DynamicVariable(DIM, "0", "hbm", name="switched")
        sok2.assign(table, np.arange(ROWS), start())
        train(lambda: tf.keras.optimizers.SGD(0.1, 0.9), table, False)
        train(SPARSE["momentum"], dense, False, wrapped=False)
        np.testing.assert_allclose(sok2.export(table)[1], dense, rtol=2e-5, atol=1e-6)
        # The package's own optimizers stay those of Keras.
        assert type(sok_like.OptimizerWrapper(stock(0.1))).__name__ == "EmbeddingAwareSGD"
    finally:
        sok2.init(use_legacy_optimizer=False)
    assert tf.keras.optimizers.SGD is stock is tf.optimizers.SGD
