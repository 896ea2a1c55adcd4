"""Models with embedding layers under Keras: compile and fit, saving, cloning, mixed precision."""

import numpy as np
import pytest
import tensorflow as tf

from sok_like.runtime.framework.running_keras import is_keras_3

pytestmark = pytest.mark.keras
keras = tf.keras
BATCH, SLOTS, DIM = 16, 2, 4


def make_model(sok, kind="dense", optimizer="adam", combiner="mean", compiled=True, **options):
    if kind == "dense":
        inputs = keras.Input((SLOTS,), dtype="int64")
    elif kind == "sparse":
        inputs = keras.Input((3,), dtype="int64", sparse=True)
    else:
        inputs = keras.Input((None,), dtype="int64", ragged=True)
    layer = sok.DistributedEmbedding(
        combiner, None, DIM, slot_num=SLOTS, max_nnz=3, name="fields", **options
    )
    outputs = keras.layers.Dense(1, activation="sigmoid", dtype="float32")(
        keras.layers.Flatten()(layer(inputs))
    )
    model = keras.Model(inputs, outputs)
    if compiled:
        stock = {
            "adam": lambda: keras.optimizers.Adam(0.05),
            "adagrad": lambda: keras.optimizers.Adagrad(0.3),
            "sgd": lambda: keras.optimizers.SGD(0.5, momentum=0.9),
        }
        model.compile(sok.OptimizerWrapper(stock[optimizer]()), "binary_crossentropy")
    return model, layer


def data(samples=4 * BATCH + 5, keys=50):
    rng = np.random.default_rng(0)
    inputs = rng.integers(0, keys, [samples, SLOTS]) * 2**50
    return inputs, (inputs.sum(axis=1) // 2**50 % 2).astype(np.float32)[:, None]


def exported(sok, layer):
    keys, rows = sok.export(layer.embedding_variable)
    return dict(zip(keys.numpy().tolist(), rows.numpy().tolist(), strict=True))


@pytest.mark.parametrize("optimizer", ["adam", "adagrad", "sgd"])
def test_fit_evaluate_predict(sok, optimizer):
    model, layer = make_model(sok, optimizer=optimizer)
    inputs, targets = data()
    history = model.fit(inputs, targets, batch_size=BATCH, epochs=10, verbose=0)
    assert history.history["loss"][-1] < 0.7 * history.history["loss"][0]
    trained = exported(sok, layer)
    assert set(trained) == set(np.unique(inputs).tolist())
    new = inputs + 2**49
    assert np.isfinite(model.evaluate(new, targets, batch_size=BATCH, verbose=0))
    assert model.predict(new, batch_size=BATCH, verbose=0).shape == (len(new), 1)
    assert exported(sok, layer).keys() == trained.keys()


@pytest.mark.parametrize("eagerly", [True, False])
def test_fit_is_the_loop_with_a_tape(sok, eagerly):
    inputs, targets = data(3 * BATCH)
    model, layer = make_model(sok)
    by_hand, other_layer = make_model(sok)
    by_hand.set_weights = None  # weights are copied below, tables start alike
    dense, other_dense = model.layers[-1], by_hand.layers[-1]
    other_dense.set_weights(dense.get_weights())
    model.compile(
        sok.OptimizerWrapper(keras.optimizers.Adam(0.05)),
        "binary_crossentropy",
        run_eagerly=eagerly,
    )
    model.fit(inputs, targets, batch_size=BATCH, shuffle=False, verbose=0)
    optimizer = sok.tf.keras.optimizers.Adam(0.05)
    loss_of = keras.losses.BinaryCrossentropy()
    for start in range(0, len(inputs), BATCH):
        with tf.GradientTape() as tape:
            predicted = by_hand(tf.constant(inputs[start : start + BATCH]), training=True)
            loss = loss_of(targets[start : start + BATCH], predicted)
        variables = by_hand.trainable_variables
        optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables, strict=True))
    rows, other_rows = exported(sok, layer), exported(sok, other_layer)
    assert rows.keys() == other_rows.keys()
    for key, row in rows.items():
        np.testing.assert_allclose(row, other_rows[key], rtol=0, atol=1e-5)
    np.testing.assert_allclose(dense.get_weights()[0], other_dense.get_weights()[0], atol=1e-5)


@pytest.mark.parametrize("kind", ["dense", "sparse", "ragged"])
def test_functional_inputs(sok, kind):
    if kind == "ragged" and is_keras_3():
        pytest.skip("Keras 3.x's Input has no ragged tensors")
    model, layer = make_model(sok, kind)
    keys = np.array([[1, 2, 2**60], [3, 0, 0], [0, 0, 0], [5, 6, 0]])
    lengths = [3, 1, 0, 2]
    ragged = tf.RaggedTensor.from_tensor(tf.constant(keys), lengths=lengths)
    batch = {
        "dense": tf.constant(keys[:2, :2]),
        "ragged": ragged,
        "sparse": tf.SparseTensor(ragged.to_sparse().indices, ragged.values, [4, 3]),
    }[kind]
    found = model(batch, training=True)
    assert found.shape == (2, 1)
    expected = {1, 2, 3, 0} if kind == "dense" else {1, 2, 2**60, 3, 5, 6}
    assert set(exported(sok, layer)) == expected
    np.testing.assert_allclose(model(batch, training=False), found)


def test_embedding_variables_are_among_the_models(sok):
    model, layer = make_model(sok)
    assert any(v is layer.embedding_variable for v in model.trainable_variables)
    embedding, other = sok.split_embedding_variable_from_others(model.trainable_variables)
    assert (len(embedding), len(other)) == (1, 2)


def test_a_stock_optimizer_in_compile_names_the_wrapper(sok):
    model, _ = make_model(sok, compiled=False)
    model.compile(keras.optimizers.Adam(), "mse")
    with pytest.raises(NotImplementedError, match=r"'fields'.*sok.OptimizerWrapper"):
        model.fit(*data(BATCH), verbose=0)


def test_clone_has_a_table_of_its_own(sok):
    model, layer = make_model(sok)
    inputs, targets = data(BATCH)
    model.fit(inputs, targets, verbose=0)
    cloned = keras.models.clone_model(model)
    other = next(x for x in cloned.layers if isinstance(x, sok.DistributedEmbedding))
    assert other.get_config() == layer.get_config()
    assert int(other.table.size()) == 0
    assert int(layer.table.size()) > 0


def test_the_optimizers_own_variables_hold_no_model_variables(sok):
    model, _ = make_model(sok)
    model.fit(*data(BATCH), verbose=0)
    alone = keras.optimizers.Adam(0.05)
    alone.build(model.layers[-1].trainable_variables)
    own = model.optimizer.variables
    own = own() if callable(own) else own
    expected = alone.variables() if callable(alone.variables) else alone.variables
    assert sorted(tuple(v.shape) for v in own) == sorted(tuple(v.shape) for v in expected)


def test_wrapped_optimizers_go_through_config(sok):
    stock = keras.optimizers.Adam(0.3, beta_1=0.8)
    wrapped = sok.OptimizerWrapper(stock, lazy=True, average_dense_gradients=False)
    again = keras.optimizers.deserialize(keras.optimizers.serialize(wrapped))
    assert type(again) is type(wrapped)
    assert again.get_config() == wrapped.get_config()
    assert again.embedding_rule == wrapped.embedding_rule
    assert again.embedding_rule.rule == "lazy_adam"


@pytest.mark.skipif(not is_keras_3(), reason="Keras 3's file format")
def test_whole_model_file(sok, tmp_path):
    from sok_like import dist_model_parallel  # the other layer of this name, loaded after ours

    assert sok.DistributedEmbedding is not dist_model_parallel.DistributedEmbedding
    model, layer = make_model(sok)
    model.fit(*data(BATCH), verbose=0)
    model.save(tmp_path / "model.keras")
    loaded = keras.models.load_model(
        tmp_path / "model.keras",
        custom_objects={"DistributedEmbedding": sok.DistributedEmbedding},
    )
    other = next(x for x in loaded.layers if isinstance(x, sok.DistributedEmbedding))
    assert exported(sok, other) == exported(sok, layer)


def test_checkpoint_of_a_variable_alone(sok, tmp_path):
    variable = sok.EmbeddingVariable(3, name="users", key_dtype="uint64")
    sok.assign(variable, np.array([2**64 - 1, 5], np.uint64), np.ones([2, 3]))
    path = tf.train.Checkpoint(table=variable).save(str(tmp_path / "table"))
    other = sok.EmbeddingVariable(3, name="users", key_dtype="uint64")
    sok.assign(other, [7], np.zeros([1, 3]))
    tf.train.Checkpoint(table=other).restore(path).assert_consumed()
    keys, rows = sok.export(other)
    assert keys.numpy().tolist() == [5, 2**64 - 1]
    assert (rows.numpy() == 1).all()


# ---- mixed precision ----


@pytest.mark.parametrize("policy", ["mixed_float16", "mixed_bfloat16"])
def test_compute_dtype_out_and_float32_rows(sok, policy):
    layer = sok.All2AllDenseEmbedding(None, 2, 1, 1, dynamic_input=True, dtype=policy)
    with tf.GradientTape() as tape:
        found = layer(tf.constant([1, 1], tf.int64))
        loss = tf.reduce_sum(tf.cast(found, tf.float32))
    assert found.dtype == policy.removeprefix("mixed_")
    assert layer.table.dtype == tf.float32
    gradient = tape.gradient(loss, layer.embedding_variable)
    assert gradient.values.dtype == tf.float32
    assert gradient.values.numpy().tolist() == [[2.0, 2.0]]


@pytest.fixture
def float16():
    before = keras.mixed_precision.global_policy()
    keras.mixed_precision.set_global_policy("mixed_float16")
    yield
    keras.mixed_precision.set_global_policy(before)


@pytest.mark.skipif(not is_keras_3(), reason="tf_keras' own loss scaling works as it is")
def test_automatic_loss_scale_of_keras_3_says_what_to_write(sok, float16):
    with pytest.raises(ValueError, match=r"sok.OptimizerWrapper\(.*LossScaleOptimizer\(optimizer"):
        make_model(sok)


def test_fit_with_loss_scale(sok, float16):
    model, layer = make_model(sok, compiled=False)
    optimizer = keras.optimizers.Adam(0.05)
    if is_keras_3():
        optimizer = sok.OptimizerWrapper(keras.optimizers.LossScaleOptimizer(optimizer))
    else:
        optimizer = sok.OptimizerWrapper(optimizer)
    model.compile(optimizer, "binary_crossentropy")
    inputs, targets = data()
    history = model.fit(inputs, targets, batch_size=BATCH, epochs=10, verbose=0)
    assert any("LossScale" in cls.__name__ for cls in type(model.optimizer).__mro__)
    assert history.history["loss"][-1] < 0.8 * history.history["loss"][0]
    assert int(layer.table.size()) == len(np.unique(inputs))
