"""A table that Keras' models look up: a layer lists it, and it trains, or the lookup raises."""

import numpy as np
import pytest
import tensorflow as tf

pytestmark = pytest.mark.keras

KERAS_3 = not hasattr(tf.keras, "__internal__")
KEYS = np.array([[5, 9], [9, 2**40], [-7, 5], [5, 5]], np.int64)
TARGETS = np.array([1.0, -1.0, 0.5, 2.0], np.float32)
RATE = 0.5


def make_table(sok, name="held", **kwargs):
    return sok.EmbeddingVariable(1, name=name, initializer="ones", **kwargs)


def oracle(steps):
    """Rows after steps of gradient descent on the mean squared error of the sum of two rows."""
    row = dict.fromkeys(KEYS.ravel().tolist(), 1.0)
    for _ in range(steps):
        step = dict.fromkeys(row, 0.0)
        for keys, target in zip(KEYS.tolist(), TARGETS, strict=True):
            error = sum(row[key] for key in keys) - target
            for key in keys:
                step[key] += RATE * 2 * error / len(KEYS)
        row = {key: value - step[key] for key, value in row.items()}
    return row


def rows_of(sok, table):
    keys, rows = sok.export(table)
    return dict(zip(keys.numpy().tolist(), rows.numpy()[:, 0].tolist(), strict=True))


def fit(sok, model, steps=2):
    model.compile(sok.OptimizerWrapper(tf.keras.optimizers.SGD(RATE)), "mse", jit_compile=False)
    model.fit(KEYS, TARGETS, batch_size=len(KEYS), epochs=steps, shuffle=False, verbose=0)


def lookups(sok):
    """Ways to look a table up, `[batch, 2] -> [batch, 2, 1]`."""
    return {
        "embedding_lookup": tf.nn.embedding_lookup,
        "gather": tf.gather,
        "group": lambda table, keys: sok.group_embedding_lookup([table], [keys])[0],
    }


def model_of(held, table_of, lookup):
    class Model(tf.keras.Model):
        def __init__(self):
            super().__init__()
            self.held = held

        def call(self, keys, training=None):
            keys = tf.cast(keys, tf.int64)
            return tf.reduce_sum(lookup(table_of(self), keys), [1, 2])

    return Model()


HOLDERS = {
    "attribute": (lambda t: t, lambda model: model.held),
    "list": (lambda t: [t], lambda model: model.held[0]),
    "dict": (lambda t: {"users": t}, lambda model: model.held["users"]),
}


@pytest.mark.parametrize("how", HOLDERS)
def test_a_table_that_a_model_holds_trains(sok, how):
    hold, table_of = HOLDERS[how]
    for name, lookup in lookups(sok).items():
        table = make_table(sok)
        model = model_of(hold(table.as_weight()), table_of, lookup)
        fit(sok, model)
        assert len(model.trainable_variables) == 1, name
        expected = oracle(2)
        found = rows_of(sok, table)
        assert found.keys() == expected.keys()
        for key, row in expected.items():
            np.testing.assert_allclose(found[key], row, rtol=1e-5, err_msg=f"{name}, key {key}")


@pytest.mark.parametrize("how", HOLDERS)
def test_a_bare_table_in_a_model_trains(sok, how):
    hold, table_of = HOLDERS[how]
    table = make_table(sok)
    fit(sok, model_of(hold(table), table_of, tf.gather))
    found = rows_of(sok, table)
    assert {key: pytest.approx(row, rel=1e-5) for key, row in oracle(2).items()} == found


def test_a_table_from_elsewhere_raises(sok):
    table = make_table(sok)
    model = model_of(None, lambda model: table, tf.nn.embedding_lookup)
    with pytest.raises(RuntimeError, match="'held' is looked up in layer .* does not list it"):
        fit(sok, model)
    # Outside of a layer the program itself says what is trained.
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(tf.gather(table, KEYS))
    assert tape.gradient(loss, table) is not None


def test_a_table_in_a_lambda_raises(sok):
    table = make_table(sok)
    keys = tf.keras.Input([2], dtype="int64")
    layer = tf.keras.layers.Lambda(lambda k: tf.gather(table, k), output_shape=(2, 1), name="bare")
    with pytest.raises(RuntimeError, match="'held' is looked up.*a Lambda layer cannot hold one"):
        model = tf.keras.Model(keys, layer(keys))  # tf_keras calls the layer already here
        model(KEYS)


def test_a_table_in_an_op_of_a_functional_model_raises(sok):
    message = "cannot be used as input to a TensorFlow function" if KERAS_3 else "does not list it"
    for held in (make_table(sok), make_table(sok).as_weight()):
        for lookup in lookups(sok).values():
            with pytest.raises((RuntimeError, ValueError), match=message):
                lookup(held, tf.keras.Input([2], dtype="int64"))


def test_a_table_that_is_not_to_be_trained_needs_no_holder(sok):
    table = make_table(sok, trainable=False)
    model = model_of(None, lambda model: table, tf.gather)
    assert model(KEYS).shape == (4,)


def test_a_layer_within_may_look_up_what_the_model_holds(sok):
    class Inner(tf.keras.layers.Layer):
        def call(self, keys, table):
            return tf.reduce_sum(tf.gather(table, keys), [1, 2])

    class Outer(tf.keras.Model):
        def __init__(self, held):
            super().__init__()
            self.held, self.inner = held, Inner()

        def call(self, keys, training=None):
            return self.inner(tf.cast(keys, tf.int64), table=self.held)

    table = make_table(sok)
    fit(sok, Outer(table.as_weight()), steps=1)
    found = rows_of(sok, table)
    assert {key: pytest.approx(row, rel=1e-5) for key, row in oracle(1).items()} == found


def test_two_layers_that_hold_a_table_list_one_variable(sok):
    table = make_table(sok)
    assert table.as_weight() is table.as_weight()
    outer = model_of(
        [model_of(table.as_weight(), lambda m: m.held, tf.gather) for _ in range(2)],
        lambda model: None,
        lambda _, keys: sum(inner(keys)[:, tf.newaxis, tf.newaxis] for inner in outer.held) / 2,
    )
    fit(sok, outer, steps=1)
    assert len(outer.trainable_variables) == 1
    found = rows_of(sok, table)
    assert {key: pytest.approx(row, rel=1e-5) for key, row in oracle(1).items()} == found


@pytest.mark.parametrize("hold", [lambda t: t, lambda t: [t], lambda t: {"users": t}])
def test_a_module_tracks_its_tables(sok, hold):
    class Holder(tf.Module):
        def __init__(self, held):
            super().__init__()
            self.held = held

    table = make_table(sok)
    module = Holder(hold(table))
    assert module.trainable_variables == (table,)
    optimizer = sok.OptimizerWrapper(tf.keras.optimizers.SGD(RATE))
    with tf.GradientTape() as tape:
        error = tf.reduce_sum(tf.gather(table, KEYS), [1, 2]) - TARGETS
        loss = tf.reduce_mean(error**2)
    gradients = tape.gradient(loss, module.trainable_variables)
    optimizer.apply_gradients(zip(gradients, module.trainable_variables, strict=True))
    found = rows_of(sok, table)
    assert {key: pytest.approx(row, rel=1e-5) for key, row in oracle(1).items()} == found
