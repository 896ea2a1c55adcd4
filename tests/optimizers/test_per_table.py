"""`OptimizerWrapper({"users": ..., "items": ...}, default=...)` against each optimizer alone."""

import numpy as np
import pytest
import tensorflow as tf

import sok_like

pytestmark = pytest.mark.keras
keras = tf.keras.optimizers
KEYS = {"users": np.array([1, 2, 1, 3]), "items": np.array([5, 6, 7, 5])}
TARGETS = np.array([[1.0], [-1.0], [2.0], [0.5]], np.float32)


def make(sok):
    return {
        "users": sok.optimizers.RowWiseAdagrad(0.1),
        "items": keras.Adam(keras.schedules.ExponentialDecay(0.05, 2, 0.5)),
    }, keras.SGD(0.2)


def model_of(sok, optimizer, name="rows"):
    tf.keras.utils.set_random_seed(3)
    inputs = {key: tf.keras.Input([], dtype="int64", name=key) for key in KEYS}
    rows = sok.GroupEmbedding({"users": 2, "items": 2}, name=name)(inputs)
    both = tf.keras.layers.Concatenate()([rows["users"], rows["items"]])
    model = tf.keras.Model(inputs, tf.keras.layers.Dense(1, name="top")(both))
    if optimizer is not None:
        model.compile(optimizer, "mse")
    return model


def fit(model, epochs=4):
    model.fit(KEYS, TARGETS, batch_size=4, epochs=epochs, shuffle=False, verbose=0)


def values(model):
    found = {}
    for value in model.get_weights():
        if hasattr(value, "rows"):
            found[value.name.rpartition("/")[2]] = value.rows
        else:
            found["kernel" if value.ndim == 2 else "bias"] = value
    return found


def alone(sok, steps):
    """Three optimizers in a loop, each with its own variables."""
    model = model_of(sok, None)
    tables, default = make(sok)
    tables["items"] = sok.OptimizerWrapper(tables["items"])
    for _ in range(steps):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((model(KEYS, training=True) - TARGETS) ** 2)
        variables = model.trainable_variables
        gradients = dict(zip(map(id, variables), tape.gradient(loss, variables), strict=True))
        for name, optimizer in [*tables.items(), (None, default)]:
            own = [v for v in variables if _table_of(v) == name]
            optimizer.apply_gradients([(gradients[id(v)], v) for v in own])
    return values(model)


def _table_of(variable):
    return next((name for name in KEYS if name in variable.name), None)


def same(found, expected):
    assert found.keys() == expected.keys() == {"users", "items", "kernel", "bias"}
    for name in expected:
        np.testing.assert_allclose(found[name], expected[name], rtol=1e-5, atol=1e-7, err_msg=name)


def test_each_table_follows_its_optimizer(sok, tmp_path):
    tables, default = make(sok)
    model = model_of(sok, sok.OptimizerWrapper(tables, default=default))
    fit(model)
    same(values(model), alone(sok, 4))
    model.save(tmp_path / "m.keras")
    loaded = tf.keras.models.load_model(tmp_path / "m.keras")
    fit(loaded, 2)  # slot rows, steps and schedules go on
    same(values(loaded), alone(sok, 6))


def test_a_table_may_be_called_default(sok):
    wrapped = sok.OptimizerWrapper({"default": keras.SGD(0.5)}, default=keras.SGD(0.1))
    assert float(wrapped.optimizer_of("default").learning_rate) == 0.5
    assert float(wrapped.learning_rate) == pytest.approx(0.1)


def scaling(optimizer):
    return tf.keras.mixed_precision.LossScaleOptimizer(optimizer, initial_scale=1024.0)


@pytest.mark.parametrize("policy", ["float32", "mixed_float16"])
def test_a_scaled_default_scales_for_all(sok, tmp_path, policy):
    tables, default = make(sok)
    before = tf.keras.mixed_precision.global_policy()
    tf.keras.mixed_precision.set_global_policy(policy)
    try:
        model = model_of(sok, sok.OptimizerWrapper(tables, default=scaling(default)))
        fit(model)
        expected = alone(sok, 4)
    finally:
        tf.keras.mixed_precision.set_global_policy(before)
    if policy == "float32":
        same(values(model), expected)
    for name, value in expected.items():  # half floats of the rows, weights and products
        np.testing.assert_allclose(values(model)[name], value, atol=5e-3, err_msg=name)
    model.save(tmp_path / "m.keras")
    loaded = tf.keras.models.load_model(tmp_path / "m.keras")
    of_users = loaded.optimizer.inner_optimizer.optimizer_of("rows/users")
    assert float(of_users.learning_rate) == pytest.approx(0.1)
    wrapped = sok.OptimizerWrapper(scaling(keras.SGD(0.2)))
    again = sok.OptimizerWrapper(make(sok)[0], default=wrapped).inner_optimizer
    assert again.optimizer_of("users") is not again


def test_a_step_that_overflows_in_one_table_changes_nothing(sok):
    tables, default = make(sok)
    model = model_of(sok, sok.OptimizerWrapper(tables, default=scaling(default)))
    fit(model, 1)
    before = values(model)
    variables = model.trainable_variables
    for infinite in range(len(variables)):
        gradients = []
        for number, variable in enumerate(variables):
            value, key = np.inf if number == infinite else 1.0, {"users": 1, "items": 5}
            if (table := _table_of(variable)) is None:
                gradients.append(tf.fill(variable.shape, value))
            else:
                gradients.append(
                    tf.IndexedSlices(tf.fill([1, 2], value), tf.constant([key[table]]))
                )
        model.optimizer.apply_gradients(zip(gradients, variables, strict=True))
        for name, value in values(model).items():
            np.testing.assert_array_equal(value, before[name], err_msg=name)


def test_rates_of_tables(sok):
    optimizer = sok.OptimizerWrapper({"items": keras.SGD(0.5)}, default=keras.SGD(0.1))
    model = model_of(sok, optimizer)
    assert model.optimizer.optimizer_of("rows/users") is model.optimizer
    model.optimizer.optimizer_of("items").learning_rate = 0.0
    model.predict(KEYS, verbose=0)
    table = next(w for w in model.weights if "items" in w.name)
    initial = getattr(table, "_embedding_variable", table).find([5, 6, 7])[0].numpy()
    fit(model, 1)
    np.testing.assert_array_equal(values(model)["items"], initial)


def test_the_default_may_be_one_that_tables_cannot_follow(sok):
    own = {"users": keras.SGD(0.1), "items": keras.SGD(0.1)}
    stock = keras.RMSprop(0.05, clipnorm=0.01)
    model = model_of(sok, sok.OptimizerWrapper(own, default=stock))
    right = model_of(sok, None)
    fit(model, 1)
    with tf.GradientTape() as tape:
        loss = tf.reduce_mean((right(KEYS, training=True) - TARGETS) ** 2)
    others = [v for v in right.trainable_variables if _table_of(v) is None]
    optimizer = keras.RMSprop(0.05, clipnorm=0.01)
    optimizer.apply_gradients(zip(tape.gradient(loss, others), others, strict=True))
    for name in ("kernel", "bias"):
        np.testing.assert_allclose(values(model)[name], values(right)[name], rtol=1e-5)
    half = sok.OptimizerWrapper({"users": keras.SGD(0.1)}, default=keras.RMSprop(0.05))
    with pytest.raises(ValueError, match="RMSprop"):
        fit(model_of(sok, half), 1)


def test_options_reach_optimizers_that_train_tables_by_themselves(sok):
    """RowWiseAdagrad is given as it is; so the options of the wrapper are set there."""
    own = sok.optimizers.RowWiseAdagrad(0.1)
    default = sok.tf.keras.optimizers.Adam(0.1)
    options = {"skip_nonfinite_gradients": True, "lazy": True, "average_dense_gradients": False}
    own = {"nan_rows": own, "by_name": "sgd"}
    optimizer = sok.OptimizerWrapper(own, default=default, **options)
    tables = [sok.EmbeddingVariable(2, name=name, initializer="ones") for name in own]
    values = tf.constant([[np.nan, 1.0], [1.0, 1.0]])
    gradient = tf.IndexedSlices(values, tf.constant([1, 2], tf.int64))
    optimizer.apply_gradients([(gradient, table) for table in tables])
    # mean(g^2) = 1, so the step is 0.1 * 1 / sqrt(1); Keras' SGD has a rate of 0.01.
    for table, moved in zip(tables, (0.9, 0.99), strict=True):
        np.testing.assert_allclose(table.find([1, 2])[0], [[1, 1], [moved] * 2], rtol=1e-6)
        assert int(optimizer.skipped_gradients(table)) == 1
    assert optimizer.embedding_rule.rule == "lazy_adam" and not optimizer._sok_average
    assert sok.optimizers.LazyAdam()._sok_lazy


def test_refused(sok):
    sgd = lambda: keras.SGD(0.1)  # noqa: E731
    for wrong in ({"itms": sgd()}, {"users": sgd(), "rows/users": sgd()}):
        model = model_of(sok, sok.OptimizerWrapper(wrong, default=sgd()))
        with pytest.raises(ValueError, match="itms|one optimizer"):
            fit(model, 1)
    v1 = tf.compat.v1.train.AdamOptimizer()
    for wrong, default, words in (
        ({"users": sgd()}, None, "`default`"),
        (sgd(), sgd(), "only then"),
        ({}, sgd(), "only then"),
        ({"users": v1}, sgd(), "Keras 3 or tf_keras"),
        ({"users": 3}, sgd(), "Keras 3 or tf_keras"),
        ({"users": scaling(sgd())}, sgd(), r"`sok.*default=Loss.*Received: {'users': '.*Loss"),
    ):
        with pytest.raises((ValueError, TypeError), match=words):
            sok.OptimizerWrapper(wrong, default=default)
    for settings in ({"clipnorm": 1.0}, {"use_ema": True}):
        with pytest.raises(ValueError, match="cannot honour"):
            sok.OptimizerWrapper({"users": keras.Adam(**settings)}, default=sgd())


def test_an_average_of_weights_leaves_tables_alone(sok):
    """With momentum 0 the average is the value itself, so `fit` ends as it does without."""
    ends = []
    for ema in ({}, {"use_ema": True, "ema_momentum": 0.0, "ema_overwrite_frequency": 2}):
        tables = {name: keras.SGD(0.1) for name in KEYS}
        default = keras.Adam(0.1, **ema)
        model = model_of(sok, sok.OptimizerWrapper(tables, default=default))
        fit(model)
        ends.append(list(values(model).values()))
    for without, with_averages in zip(*ends, strict=True):
        np.testing.assert_allclose(with_averages, without, rtol=1e-6)


def test_two_ranks_train_as_one(on_threads):
    def check():
        tables, default = make(sok_like)
        model = model_of(sok_like, sok_like.OptimizerWrapper(tables, default=default))
        model.predict(KEYS, verbose=0)
        model.get_layer("top").set_weights([np.ones([4, 1]), np.zeros([1])])
        mine = slice(sok_like.rank(), None, sok_like.size())
        keys = {name: values[mine] for name, values in KEYS.items()}
        size = len(TARGETS) // sok_like.size()
        model.fit(keys, TARGETS[mine], batch_size=size, epochs=3, verbose=0)
        layer = model.get_layer("rows")
        rows = {name: tf.nn.embedding_lookup(layer.tables[name], KEYS[name]) for name in KEYS}
        return {**rows, "kernel": model.get_layer("top").get_weights()[0]}

    (alone,) = on_threads(1, check)
    for found in on_threads(2, check):
        for name, values in alone.items():
            np.testing.assert_allclose(found[name], values, rtol=1e-5, atol=1e-6, err_msg=name)
