"""Embedding and ordinary variables under one optimizer; stock optimizers that were not wrapped."""

import numpy as np
import pytest
import tensorflow as tf

from sok_like.runtime.framework.running_keras import is_keras_3

pytestmark = pytest.mark.keras
keras = tf.keras.optimizers
v1 = tf.compat.v1.train


@pytest.fixture
def layer(sok):
    return sok.All2AllDenseEmbedding(None, 2, 1, 1, dynamic_input=True, name="users")


def loss_and_gradients(layer, ordinary):
    variables = [layer.embedding_variable, ordinary]
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(layer(tf.constant([1, 5, 1], tf.int64)) * ordinary)
    return tape.gradient(loss, variables), variables


@pytest.mark.parametrize(
    "make", [lambda: keras.Adam(0.1), lambda: v1.MomentumOptimizer(0.1, 0.9)], ids=["adam", "v1"]
)
def test_ordinary_variables_are_left_to_the_stock_optimizer(sok, layer, make):
    wrapped, stock = sok.OptimizerWrapper(make()), make()
    ordinary, alone = tf.Variable([1.0, 2.0]), tf.Variable([1.0, 2.0])
    before = layer(tf.constant([1, 5], tf.int64), training=False).numpy()
    for _ in range(3):
        gradients, variables = loss_and_gradients(layer, ordinary)
        wrapped.apply_gradients(zip(gradients, variables, strict=True))
        stock.apply_gradients([(gradients[1], alone)])
    np.testing.assert_allclose(ordinary, alone, rtol=1e-6)
    after = layer(tf.constant([1, 5], tf.int64), training=False).numpy()
    assert (before != after).all()


@pytest.mark.parametrize(
    "make", [lambda: keras.SGD(0.1), lambda: v1.GradientDescentOptimizer(0.1)], ids=["sgd", "v1"]
)
def test_stock_optimizer_names_the_wrapper(sok, layer, make):
    gradients, variables = loss_and_gradients(layer, tf.Variable([1.0, 2.0]))
    variables[0] = layer.table  # v1's optimizers take no variable of Keras 3
    sok.OptimizerWrapper(make()).apply_gradients([(gradients[0], variables[0])])
    before = layer.table.numpy().rows
    with pytest.raises(NotImplementedError, match=r"'users'.*sok.OptimizerWrapper\(optimizer\)"):
        make().apply_gradients(zip(gradients, variables, strict=True))
    assert (layer.table.numpy().rows == before).all()


def test_wrapper_and_wrapped_share_their_state(sok, layer):
    stock = keras.SGD(0.5)
    wrapped = sok.OptimizerWrapper(stock)
    assert isinstance(wrapped, keras.SGD)
    stock.learning_rate = 0.25
    assert float(wrapped.learning_rate) == 0.25
    gradients, variables = loss_and_gradients(layer, tf.Variable([1.0, 2.0]))
    before = layer(tf.constant([5], tf.int64), training=False).numpy()
    wrapped.apply_gradients(zip(gradients, variables, strict=True))
    after = layer(tf.constant([5], tf.int64), training=False).numpy()
    np.testing.assert_allclose(after, before - 0.25 * np.array([[1.0, 2.0]]), rtol=1e-6)
    assert int(stock.iterations) == int(wrapped.iterations) == 1


def test_a_wrapped_optimizer_is_not_wrapped_again(sok):
    wrapped = sok.OptimizerWrapper(keras.Adam(0.1), lazy=True)
    for optimizer in (wrapped, sok.tf.keras.optimizers.Adam(0.1)):
        with pytest.raises(TypeError, match="must not be wrapped again.*Received: .*Adam"):
            sok.OptimizerWrapper(optimizer)


def test_wrappers_of_one_optimizer_agree(sok):
    stock = keras.Adam(0.1)
    wrapped = sok.OptimizerWrapper(stock, lazy=True)
    message = "lazy=False, average=True, skip_nonfinite=False after lazy=True.*optimizer Adam"
    with pytest.raises(ValueError, match=message):
        sok.OptimizerWrapper(stock)
    assert sok.OptimizerWrapper(stock, lazy=True).embedding_rule == wrapped.embedding_rule


@pytest.mark.parametrize("make", [lambda: keras.SGD(0.1), lambda: v1.AdamOptimizer(0.1)])
def test_gradient_that_is_not_by_key(sok, layer, make):
    layer(tf.constant([1], tf.int64))
    with pytest.raises(TypeError, match=r"must be tf.IndexedSlices of keys.*table 'users'"):
        sok.OptimizerWrapper(make()).apply_gradients([(tf.zeros([1, 2]), layer.embedding_variable)])


def test_missing_gradients_move_nothing(sok, layer):
    ordinary = tf.Variable([1.0, 2.0])
    gradients, variables = loss_and_gradients(layer, ordinary)
    wrapped = sok.OptimizerWrapper(keras.Adam(0.1))
    before = layer.table.numpy().rows
    with pytest.warns(UserWarning, match=r"Gradients do not exist for variables \['users'\]"):
        wrapped.apply_gradients([(None, variables[0]), (gradients[1], ordinary)])
    assert (layer.table.numpy().rows == before).all()
    moved = ordinary.numpy().copy()
    with pytest.warns(UserWarning, match="Gradients do not exist for variables"):
        wrapped.apply_gradients([(gradients[0], variables[0]), (None, ordinary)])
    assert (layer.table.numpy().rows != before).all()
    assert (ordinary.numpy() == moved).all() or not is_keras_3()


@pytest.mark.parametrize("alone", [False, True])
def test_no_gradient_at_all(sok, layer, alone):
    """Stock optimizers raise; a table's should not be silent where theirs are not."""
    variables = [layer.embedding_variable, *([] if alone else [tf.Variable(1.0)])]
    layer(tf.constant([1], tf.int64))
    with pytest.raises(ValueError, match="No gradients provided for any variable.*'users'"):
        sok.OptimizerWrapper(keras.Adam(0.1)).apply_gradients([(None, v) for v in variables])


@pytest.mark.parametrize("traced", [False, True])
def test_the_rate_of_a_schedule_can_be_read_where_only_tables_are_trained(sok, layer, traced):
    rates = keras.schedules.PiecewiseConstantDecay([0, 1], [0.5, 0.25, 0.125])
    wrapped, stock = sok.OptimizerWrapper(keras.SGD(rates)), keras.SGD(rates)
    ordinary = tf.Variable([1.0, 2.0])

    def step():
        gradients, variables = loss_and_gradients(layer, ordinary)
        wrapped.apply_gradients(zip(gradients[:1], variables[:1], strict=True))
        stock.apply_gradients(zip(gradients[1:], variables[1:], strict=True))

    step = tf.function(step) if traced else step
    for _ in range(3):
        step()
        assert float(wrapped.learning_rate) == float(stock.learning_rate)


def test_sok_optimizers_adam_refuses_ordinary_variables(sok, layer):
    gradients, variables = loss_and_gradients(layer, tf.Variable([1.0, 2.0]))
    optimizer = sok.optimizers.Adam(0.1)
    assert optimizer.name == "Plugin_Adam"
    with pytest.raises(ValueError, match="trains embedding variables only.*Received"):
        optimizer.apply_gradients(zip(gradients, variables, strict=True))
    sok.optimizers.Adam(0.1).apply_gradients([(gradients[0], variables[0])])


@pytest.mark.parametrize("name", ["Adam", "LazyAdam", "wrapped"])
def test_optimizers_of_sok_go_through_config(sok, name):
    if name == "wrapped":
        stock = keras.Adam(0.3, beta_1=0.8)
        optimizer = sok.OptimizerWrapper(stock, lazy=True, average_dense_gradients=False)
    else:
        cls = {"Adam": sok.tf.keras.optimizers.Adam, "LazyAdam": sok.optimizers.LazyAdam}[name]
        optimizer = cls(0.3, beta_1=0.8)
    again = tf.keras.optimizers.deserialize(tf.keras.optimizers.serialize(optimizer))
    assert type(again) is type(optimizer)
    config = optimizer.get_config()
    assert again.get_config() == config and again.embedding_rule == optimizer.embedding_rule
    if name == "wrapped":
        assert config["sok_lazy"] is True and config["sok_average"] is False


@pytest.mark.parametrize("name", ["Adagrad", "Adam"])
def test_ordinary_rows_that_are_used_twice(sok, name):
    """Parts of a row's gradient count as their sum, as in a dense gradient."""
    wrapped = sok.OptimizerWrapper(getattr(tf.keras.optimizers, name)(0.1))
    stock = getattr(tf.keras.optimizers, name)(0.1)
    ours, right = tf.Variable(tf.ones([3, 2])), tf.Variable(tf.ones([3, 2]))
    for _ in range(3):
        with tf.GradientTape() as tape:
            rows = tf.concat([tf.gather(ours, [0, 2]), 3 * tf.gather(ours, [2])], 0)
            loss = tf.reduce_sum(rows**2)
        gradient = tape.gradient(loss, ours)
        assert isinstance(gradient, tf.IndexedSlices)
        wrapped.apply_gradients([(gradient, ours)])
        # The gradient of x0^2 + 10 x2^2.
        stock.apply_gradients([(right * [[2.0], [0.0], [20.0]], right)])
    np.testing.assert_allclose(ours, right, rtol=1e-6)


def tables_and_gradients(sok, num_tables):
    numbers, values = range(num_tables), tf.constant([[1.0], [2.0]])
    tables = [sok.EmbeddingVariable(1, name=f"t{i}", initializer="zeros") for i in numbers]
    keys = [tf.constant([7, 7 + i], tf.int64) for i in numbers]
    return tables, [tf.IndexedSlices(values * (i + 1), keys[i]) for i in numbers]


@pytest.mark.parametrize("make", [lambda: keras.SGD(0.5), lambda: v1.GradientDescentOptimizer(0.5)])
def test_one_op_updates_all_tables(sok, make):
    tables, gradients = tables_and_gradients(sok, 3)
    optimizer = sok.OptimizerWrapper(make())

    @tf.function
    def step():
        optimizer.apply_gradients(zip([gradients[0], None, gradients[2]], tables, strict=True))

    step()
    updates = step.get_concrete_function().graph.get_operations()
    assert [op.type for op in updates].count("SokApplyGradients") == 1
    assert tables[0].numpy().rows.tolist() == [[-1.5]]  # equal keys add up
    assert tables[1].numpy().rows.tolist() == []  # had no gradient
    assert tables[2].numpy().rows.tolist() == [[-1.5], [-3.0]]


@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize("given", ["var_names", "var_list", "var_list of weights"])
def test_tables_left_out_of_weight_decay_are_updated_apart(sok, given, scaled):
    tables, gradients = tables_and_gradients(sok, 3)
    for table in tables:
        sok.assign(table, [7], [[1.0]])
    optimizer = keras.SGD(0.5, weight_decay=0.5)
    left_out = {"var_names": ["t1"]}
    if given != "var_names":
        weight = tables[1].as_weight() if "weights" in given else tables[1]
        left_out = {"var_list": (weight for _ in range(1))}
    if scaled:
        optimizer = tf.keras.mixed_precision.LossScaleOptimizer(optimizer)
    elif given == "var_names":  # of the stock optimizer; else of the one that knows tables
        optimizer.exclude_from_weight_decay(**left_out)
    optimizer = sok.OptimizerWrapper(optimizer)
    if scaled or given != "var_names":
        optimizer.exclude_from_weight_decay(**left_out)
    gradients = [tf.IndexedSlices([[0.0]], tf.constant([7], tf.int64))] * 3
    optimizer.apply_gradients(zip(gradients, tables, strict=True))
    assert [float(table.numpy().rows[0, 0]) for table in tables] == [0.75, 1.0, 0.75]


def test_tables_with_optimizers_of_their_own_are_left_out_there(sok):
    tables, _ = tables_and_gradients(sok, 1)
    joint = sok.OptimizerWrapper({"t0": keras.SGD(0.5)}, default=keras.SGD(0.5))
    for given in ({"var_names": ["t0"]}, {"var_list": tables}):
        with pytest.raises(ValueError, match=r"Tables \['t0'\] have optimizers of their own"):
            joint.exclude_from_weight_decay(**given)


def test_variable_given_twice_takes_two_steps(sok):
    tables, gradients = tables_and_gradients(sok, 2)
    pairs = [(gradients[0], tables[0]), (gradients[1], tables[1]), (gradients[0], tables[0])]
    sok.OptimizerWrapper(v1.AdagradOptimizer(1.0, initial_accumulator_value=1.0)).apply_gradients(
        pairs
    )
    np.testing.assert_allclose(tables[0].numpy().rows, [[-3 / 10**0.5 - 3 / 19**0.5]], rtol=1e-6)


def test_table_that_cannot_take_the_step_leaves_the_others_alone(sok):
    full = sok.EmbeddingVariable(1, name="full", capacity=1)
    tables, gradients = tables_and_gradients(sok, 3)
    tables[1] = full
    optimizer = sok.OptimizerWrapper(keras.SGD(0.5))
    with pytest.raises(tf.errors.ResourceExhaustedError, match="max_capacity=1.*table 'full'"):
        optimizer.apply_gradients(zip(gradients, tables, strict=True))
    assert [int(table.size()) for table in tables] == [0, 0, 0]


@pytest.mark.parametrize("given", ["adam", "Adam", {"class_name": "SGD", "config": {}}])
def test_optimizers_by_name(sok, layer, given):
    """As Keras' strings: its defaults, seen by the step that they take."""
    found = sok.OptimizerWrapper(given)
    stock = keras.get(given)
    assert isinstance(found, type(stock))
    rows = layer(tf.constant([5], tf.int64), training=True).numpy()
    ordinary = tf.Variable(rows)
    found.apply_gradients([(tf.IndexedSlices(tf.ones([1, 2]), [5]), layer.embedding_variable)])
    stock.apply_gradients([(tf.ones([1, 2]), ordinary)])
    np.testing.assert_allclose(layer.table.find([5])[0], ordinary, rtol=1e-5)
    with pytest.raises(ValueError, match="nosuch|Could not interpret|Unknown"):
        sok.OptimizerWrapper("nosuch")
    with pytest.raises(TypeError, match="positional"):
        sok.callbacks.TableMetrics("logs")  # Keras' TensorBoard takes its folder first


def test_a_subclass_with_the_name_of_a_stock_class_leaves_files_of_that_alone(sok):
    own = type("SGD", (keras.SGD,), {"__module__": __name__})
    wrapped = [sok.OptimizerWrapper(cls(0.1)) for cls in (keras.SGD, own, keras.SGD)]
    for optimizer in wrapped:
        again = keras.deserialize(keras.serialize(optimizer))
        assert type(again) is type(optimizer)
