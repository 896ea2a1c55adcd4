"""Tables that Keras' models look up.

A layer lists the table, and it trains, or the lookup raises. Models whose `call` has no `training`
insert keys in `fit`, and none in `evaluate` and `predict`. Floats for the integer inputs of a model
raise if they are keys; other integers are Keras' affair.
"""

import numpy as np
import pytest
import tensorflow as tf

from tests import thread_ranks
from tests.training import rows_by_key, train_step

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


def check_rows(table, steps):
    right = {key: pytest.approx(row, rel=1e-5) for key, row in oracle(steps).items()}
    assert right == {key: row[0] for key, row in rows_by_key(table).items()}


@pytest.mark.parametrize(
    "how, lookup, bare",
    [
        ("attribute", "embedding_lookup", False),
        ("list", "gather", False),
        ("dict", "group", False),
        *((how, "gather", True) for how in HOLDERS),
    ],
)
def test_a_table_that_a_model_holds_trains(sok, how, lookup, bare):
    hold, table_of = HOLDERS[how]
    table = make_table(sok)
    held = hold(table if bare else table.as_weight())
    model = model_of(held, table_of, lookups(sok)[lookup])
    fit(sok, model)
    assert bare or len(model.trainable_variables) == 1
    check_rows(table, 2)


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
    check_rows(table, 1)


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
    check_rows(table, 1)


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

    def loss_of():
        return tf.reduce_mean((tf.reduce_sum(tf.gather(table, KEYS), [1, 2]) - TARGETS) ** 2)

    train_step(optimizer, module.trainable_variables, loss_of)
    check_rows(table, 1)


@pytest.fixture
def with_gpu(monkeypatch):
    """Keras sees a GPU, for which it chooses XLA; steps run on the CPU, where XLA works, too."""
    if not KERAS_3:
        pytest.skip("tf_keras leaves XLA to the program")
    own, gpu = tf.config.list_physical_devices, tf.config.PhysicalDevice("/gpu:0", "GPU")
    monkeypatch.setattr(
        *(tf.config, "list_physical_devices"),
        lambda kind=None: [*own(), gpu] if kind is None else own(kind),
    )


class Looks(tf.keras.layers.Layer):
    """A user's layer, which makes its table where Keras' layers make their variables."""

    def __init__(self, sok, **kwargs):
        super().__init__(**kwargs)
        self.sok = sok

    def build(self, shape):
        self.held = make_table(self.sok).as_weight()
        self.built = True

    def call(self, keys):
        (rows,) = self.sok.group_embedding_lookup([self.held], [tf.cast(keys, tf.int64)])
        return tf.reduce_sum(rows, [1, 2])


@pytest.mark.parametrize("options", [{}, {"jit_compile": True}], ids=["auto", "asked"])
@pytest.mark.filterwarnings("ignore:Model doesn't support `jit_compile")
def test_keras_compiles_no_model_with_a_table_by_xla(sok, with_gpu, options):
    keys = tf.keras.Input([2], dtype="int64")
    model = tf.keras.Model(keys, Looks(sok)(keys))
    model.compile(sok.OptimizerWrapper(tf.keras.optimizers.SGD(RATE)), "mse", **options)
    assert model.jit_compile is False
    model.fit(KEYS, TARGETS, batch_size=len(KEYS), epochs=2, shuffle=False, verbose=0)
    check_rows(model.layers[-1].held._embedding_variable, 2)


@pytest.mark.parametrize("step", ["fit", "evaluate", "predict"])
def test_a_table_made_in_a_step_that_xla_compiles_is_named(sok, with_gpu, step):
    model = tf.keras.Sequential([Looks(sok)])
    model.compile(sok.OptimizerWrapper(tf.keras.optimizers.SGD(RATE)), "mse")
    arguments = (KEYS,) if step == "predict" else (KEYS, TARGETS)
    with pytest.raises(RuntimeError, match="'held'.*jit_compile=False"):
        getattr(model, step)(*arguments, verbose=0)
    model.compile(sok.OptimizerWrapper(tf.keras.optimizers.SGD(RATE)), "mse")  # built by now
    getattr(model, step)(*arguments, verbose=0)


@pytest.mark.skipif(not KERAS_3, reason="tf_keras compiles by XLA only if a program asks for it")
def test_keras_compiles_by_xla_what_has_neither_tables_nor_ranks(sok):
    from keras.src.trainers.trainer import model_supports_jit

    def supports(layer):
        model = tf.keras.Sequential([tf.keras.Input([2], dtype="int64"), layer])
        return model_supports_jit(model)

    def dense():
        return supports(tf.keras.layers.Dense(1))

    assert dense()
    assert not supports(sok.All2AllDenseEmbedding(100, 4, slot_num=2, nnz_per_slot=1))
    assert thread_ranks.run(2, dense) == [False, False]


# ---- keys are inserted in `fit` alone ----


def layers(sok):
    """Layers over one table, and functions `[batch, 2] -> [batch, ...]` that call them."""
    fields = sok.DistributedEmbedding("sum", None, 2, 2, 1, name="fields")
    flat = sok.All2AllDenseEmbedding(None, 2, 2, 1, name="flat")
    group = sok.GroupEmbedding([2], name="group")
    hashed = sok.HashEmbedding(2, name="hashed")
    listed = sok.HashEmbedding(2, name="listed")
    dmp = sok.dist_model_parallel.DistributedEmbedding([listed])
    key = sok.feature_column.categorical_column_with_embedding("key", dtype=tf.int64)
    columns = sok.feature_column.DenseFeatures([sok.feature_column.embedding_column(key, 2)])
    table = sok.EmbeddingVariable(2, name="by_key").as_weight()
    return {
        "fields": (fields, fields),
        "flat": (flat, flat),
        "group": (group, lambda keys: group([keys])[0]),
        "hashed": (hashed, hashed),
        "dmp": (dmp, lambda keys: dmp([keys])[0]),
        "columns": (columns, lambda keys: columns({"key": keys})),
        "by key": (table, lambda keys: tf.gather(table, keys)),
        "function": (table, lambda keys: sok.group_embedding_lookup([table], [keys])[0]),
    }


class WithoutFlag(tf.keras.Model):
    def __init__(self, holder, rows):
        super().__init__()
        self.holder, self.rows = holder, rows
        self.flatten = tf.keras.layers.Flatten()
        self.dropout = tf.keras.layers.Dropout(0.5)
        self.normalize = tf.keras.layers.BatchNormalization()
        self.dense = tf.keras.layers.Dense(1)

    def call(self, keys):
        rows = self.flatten(self.rows(tf.cast(keys, tf.int64)))
        return self.dense(self.normalize(self.dropout(rows)))

    def count(self):
        return sum(int(w.size()) for w in self.weights if hasattr(w, "table_name"))


class OwnSteps(WithoutFlag):
    def test_step(self, data):
        return {"loss": tf.reduce_mean((self(data[0]) - data[1]) ** 2)}

    def predict_step(self, data):
        return self(data[0] if isinstance(data, tuple) else data)


@pytest.mark.parametrize(
    "cls, kind",
    [
        *[(WithoutFlag, kind) for kind in ("fields", "flat", "group", "hashed", "dmp", "columns")],
        (WithoutFlag, "by key"),
        (WithoutFlag, "function"),
        (OwnSteps, "fields"),
        (OwnSteps, "by key"),
    ],
)
def test_only_fit_inserts_keys(sok, cls, kind):
    model = cls(*layers(sok)[kind])
    optimizer = sok.OptimizerWrapper(tf.keras.optimizers.SGD(0.1))
    model.compile(optimizer, "mse", run_eagerly=kind != "fields", jit_compile=False)
    first = model.predict(KEYS, verbose=0)
    # A flag of the table's layer must not reach the layers behind it.
    np.testing.assert_array_equal(model.predict_on_batch(KEYS), first)
    model.evaluate(KEYS, TARGETS, verbose=0)
    model.test_on_batch(KEYS, TARGETS)
    assert model.count() == 0
    assert not model.normalize.moving_mean.numpy().any()
    model.fit(KEYS[:1], TARGETS[:1], validation_data=(KEYS, TARGETS), verbose=0)
    assert model.count() == 2


def test_a_given_flag_counts(sok):
    _, look_up = layers(sok)["fields"]
    model = WithoutFlag(look_up, lambda keys: look_up(keys[:, ::-1], training=True))
    model.compile(loss="mse", run_eagerly=True)
    model.predict(KEYS + 100, verbose=0)
    assert model.count() == len(np.unique(KEYS))


# ---- floats for integer inputs ----

LARGE = np.array([[2**53 + 1]], np.int64)


def group(sok, keys):
    return sok.GroupEmbedding({"k": 2})({"k": keys})["k"]


def sok1(sok, keys):
    return sok.All2AllDenseEmbedding(None, 2, slot_num=1, nnz_per_slot=1)(keys)


def nested(sok, keys):
    inner = tf.keras.Input([1], dtype="int64")
    return tf.keras.Model(inner, sok1(sok, inner))(keys)


def reshaped(sok, keys):
    return sok1(sok, tf.keras.layers.Reshape([1, 1])(keys))


def own_layer(sok, keys):
    return Looks(sok)(keys)


@pytest.mark.parametrize("through", [group, sok1, nested, reshaped, own_layer])
def test_floats_for_keys(sok, through):
    keys = tf.keras.Input([1], dtype="int64", name="ids")
    rows = tf.keras.layers.Flatten()(through(sok, keys))
    model = tf.keras.Model(keys, tf.keras.layers.Dense(1)(rows))
    optimizer = sok.OptimizerWrapper(tf.keras.optimizers.SGD(0.1))
    model.compile(optimizer, "mse", run_eagerly=False)
    model.fit(LARGE, np.ones([1, 1]), verbose=0)
    model.predict(LARGE.astype(np.uint32), verbose=0)
    for wrong in (LARGE.astype(float), np.array([[0.7]], np.float32)):
        data = tf.data.Dataset.from_tensors((wrong, np.ones([1, 1])))
        for call in (
            lambda wrong=wrong: model.fit(wrong, np.ones([1, 1]), verbose=0),
            lambda data=data: model.fit(data, verbose=0),
            lambda data=data: model.evaluate(data, verbose=0),
            lambda wrong=wrong: model.predict(wrong, verbose=0),
            lambda wrong=wrong: model(tf.constant(wrong)),
        ):
            with pytest.raises(TypeError, match="'ids' must be integers.*Received.*float"):
                call()
    (table,) = (v for v in model.variables if hasattr(v, "table_name"))
    assert sok.export(table)[0].numpy().tolist() == LARGE[0].tolist()


def test_floats_for_keys_of_a_sequential_model(sok):
    layer = sok.All2AllDenseEmbedding(None, 2, slot_num=1, nnz_per_slot=1)
    model = tf.keras.Sequential([tf.keras.Input([1], dtype="int64"), layer])
    assert model.predict(LARGE, verbose=0).shape == (1, 1, 1, 2)
    for call in (model, lambda keys: model.predict(keys, verbose=0)):
        with pytest.raises(TypeError, match="must be integers"):
            call(LARGE.astype(float))


def test_inputs_that_are_no_keys(sok):
    keys = tf.keras.Input([1], dtype="int64")
    number, price = tf.keras.Input([1], dtype="int32"), tf.keras.Input([1])
    stock = tf.keras.layers.Embedding(9, 2)(number)
    both = tf.keras.layers.Concatenate()([tf.keras.layers.Flatten()(stock), price])
    model = tf.keras.Model([keys, number, price], [both, sok1(sok, keys)])
    model.predict([LARGE, np.array([[2.0]]), np.array([[0.5]])], verbose=0)
