"""Layers in Keras models: compile and fit, saving, cloning, mixed precision, transfer learning."""

import numpy as np
import pytest
import tensorflow as tf

from sok_like import feature_column
from sok_like.runtime.framework.running_keras import is_keras_3
from tests.training import rows_by_key

pytestmark = pytest.mark.keras
keras = tf.keras
BATCH, SLOTS, DIM = 16, 2, 4


def make_model(sok, kind="dense", compiled=True):
    if kind == "dense":
        inputs = keras.Input((SLOTS,), dtype="int64")
    elif kind == "sparse":
        inputs = keras.Input((3,), dtype="int64", sparse=True)
    else:
        inputs = keras.Input((None,), dtype="int64", ragged=True)
    layer = sok.DistributedEmbedding("mean", None, DIM, slot_num=SLOTS, max_nnz=3, name="fields")
    rows = keras.layers.Flatten()(layer(inputs))
    outputs = keras.layers.Dense(1, activation="sigmoid", dtype="float32")(rows)
    model = keras.Model(inputs, outputs)
    if compiled:
        model.compile(sok.OptimizerWrapper(keras.optimizers.Adam(0.05)), "binary_crossentropy")
    return model, layer


def data(samples=4 * BATCH + 5, keys=50):
    rng = np.random.default_rng(0)
    inputs = rng.integers(0, keys, [samples, SLOTS]) * 2**50
    return inputs, (inputs.sum(axis=1) // 2**50 % 2).astype(np.float32)[:, None]


def test_fit_evaluate_predict(sok):
    model, layer = make_model(sok)
    assert any(v is layer.embedding_variable for v in model.trainable_variables)
    inputs, targets = data()
    history = model.fit(inputs, targets, batch_size=BATCH, epochs=10, verbose=0)
    assert history.history["loss"][-1] < 0.7 * history.history["loss"][0]
    trained = rows_by_key(layer.table)
    assert set(trained) == set(np.unique(inputs).tolist())
    new = inputs + 2**49
    assert np.isfinite(model.evaluate(new, targets, batch_size=BATCH, verbose=0))
    assert model.predict(new, batch_size=BATCH, verbose=0).shape == (len(new), 1)
    assert rows_by_key(layer.table) == trained


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
    assert set(rows_by_key(layer.table)) == expected
    np.testing.assert_allclose(model(batch, training=False), found)


def test_a_stock_optimizer_in_compile_names_the_wrapper(sok):
    model, _ = make_model(sok, compiled=False)
    model.compile(keras.optimizers.Adam(), "mse")
    with pytest.raises(NotImplementedError, match=r"'fields'.*sok.OptimizerWrapper"):
        model.fit(*data(BATCH), verbose=0)


def test_clone_has_a_table_of_its_own(sok):
    model, layer = make_model(sok, compiled=False)
    model(data(BATCH)[0], training=True)
    other = keras.models.clone_model(model).get_layer("fields")
    assert other.get_config() == layer.get_config()
    assert int(other.table.size()) == 0 < int(layer.table.size())


def test_the_optimizers_own_variables_hold_no_model_variables(sok):
    model, _ = make_model(sok)
    model.fit(*data(BATCH), verbose=0)
    alone = keras.optimizers.Adam(0.05)
    alone.build(model.layers[-1].trainable_variables)
    own = model.optimizer.variables
    own = own() if callable(own) else own
    expected = alone.variables() if callable(alone.variables) else alone.variables
    assert sorted(tuple(v.shape) for v in own) == sorted(tuple(v.shape) for v in expected)


@pytest.mark.skipif(not is_keras_3(), reason="Keras 3's file format")
def test_whole_model_file(sok, tmp_path):
    """`dist_model_parallel` has another layer of this name, which is loaded after ours."""
    assert sok.DistributedEmbedding is not sok.dist_model_parallel.DistributedEmbedding
    model, layer = make_model(sok)
    model(data(BATCH)[0], training=True)
    model.save(tmp_path / "model.keras")
    named = {"DistributedEmbedding": sok.DistributedEmbedding}
    loaded = keras.models.load_model(tmp_path / "model.keras", custom_objects=named)
    assert rows_by_key(loaded.get_layer("fields").table) == rows_by_key(layer.table) != {}


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
        optimizer = keras.optimizers.LossScaleOptimizer(optimizer)
    model.compile(sok.OptimizerWrapper(optimizer), "binary_crossentropy")
    inputs, targets = data()
    history = model.fit(inputs, targets, batch_size=BATCH, epochs=10, verbose=0)
    assert any("LossScale" in cls.__name__ for cls in type(model.optimizer).__mro__)
    assert history.history["loss"][-1] < 0.8 * history.history["loss"][0]
    assert int(layer.table.size()) == len(np.unique(inputs))


COLUMN = feature_column.embedding_column(
    feature_column.categorical_column_with_embedding("ids", dtype=tf.int64), 2
)
DOORS = {
    "distributed": lambda sok, **options: sok.DistributedEmbedding("sum", None, 2, 1, 1, **options),
    "all_to_all": lambda sok, **options: sok.All2AllDenseEmbedding(None, 2, 1, 1, **options),
    "group": lambda sok, **options: sok.GroupEmbedding([2], **options),
    "hashed": lambda sok, **options: sok.HashEmbedding(2, "sum", **options),
    "columns": lambda sok, **options: feature_column.DenseFeatures([COLUMN], **options),
}


@pytest.mark.parametrize("door", DOORS)
def test_a_layer_made_frozen_trains_once_it_is_not(sok, door):
    layer = DOORS[door](sok, trainable=False, name=door)

    class Model(keras.Model):
        def __init__(self):
            super().__init__()
            self.layer = layer

        def call(self, ids):
            if door == "group":
                ids = [ids]
            rows = layer({"ids": tf.sparse.from_dense(ids)} if door == "columns" else ids)
            return tf.reshape(rows, [-1, 2])

    model, ids = Model(), np.array([[1], [2]])
    before = model(ids).numpy()
    assert not layer.trainable_variables and not model.trainable_variables
    for trainable in (False, True):
        layer.trainable = trainable
        assert len(layer.trainable_variables) == len(model.trainable_variables) == trainable
    model.compile(sok.OptimizerWrapper(keras.optimizers.SGD(1.0)), "mse")
    model.fit(ids, before - 1, batch_size=2, verbose=0)  # the slope is 2 / 4
    np.testing.assert_allclose(model(ids, training=False), before - 0.5, atol=1e-6)


@pytest.mark.parametrize("door", DOORS)
def test_weights_as_keras_layers_take_them_are_refused(sok, door):
    """tf_keras would take the argument and never look at it."""
    with pytest.raises(TypeError, match="`weights` is not.*sok.assign"):
        DOORS[door](sok, weights=[np.ones([4, 2])])


def test_a_matrix_is_not_an_initial_row(sok):
    matrix = np.arange(8, dtype=np.float32).reshape(4, 2)
    with pytest.raises(ValueError, match=r"row of 2 .*sok.assign.*shape \(4, 2\)"):
        sok.EmbeddingVariable(2, initializer=keras.initializers.Constant(matrix))
    for row in (matrix[1], matrix[1:2]):
        table = sok.EmbeddingVariable(2, initializer=keras.initializers.Constant(row))
        assert table.find([7])[0].numpy().tolist() == [[2, 3]]
