"""What Keras asks of a model's weights: to count, get and set them, and to export the model."""

import pickle

import numpy as np
import pytest
import tensorflow as tf

from sok_like.table.snapshots import TableWeights
from tests.training import rows_by_key, train_step

pytestmark = pytest.mark.keras

KERAS_3 = not hasattr(tf.keras, "__internal__")
X = np.arange(32).reshape(16, 2) * 2**33 - 5
Y = np.linspace(-1, 1, 16)[:, None].astype(np.float32)


def make_model(sok):
    keys = tf.keras.Input([2], dtype="int64")
    rows = sok.DistributedEmbedding("sum", None, 4, slot_num=2, max_nnz=1, name="rows")(keys)
    output = tf.keras.layers.Dense(1)(tf.keras.layers.Flatten()(rows))
    model = tf.keras.Model(keys, output)
    model.compile(sok.OptimizerWrapper(tf.keras.optimizers.Adam(0.1)), "mse", jit_compile=False)
    return model


def table_of(model):
    return model.get_layer("rows").table


@pytest.fixture
def model(sok):
    made = make_model(sok)
    made.fit(X, Y, verbose=0)
    return made


def exported(model):
    return rows_by_key(table_of(model))


def test_counts_are_of_what_the_table_holds(sok, model):
    fresh = make_model(sok)
    assert fresh.count_params() == 8 + 1
    assert model.count_params() == 32 * 4 + 8 + 1
    lines = []
    model.summary(print_fn=lambda line, **_: lines.append(line))
    assert "128" in "\n".join(lines) and "137" in "\n".join(lines)
    assert tuple(model.get_layer("rows").embedding_variable.shape) == (32, 4)


def test_get_and_set_go_by_key(sok, model):
    before, weights = exported(model), model.get_weights()
    expected = model.predict(X, verbose=0)
    model.fit(X + 1, Y, verbose=0)  # other keys, and moments that move the first ones too
    assert len(exported(model)) == 64
    model.set_weights(weights)
    assert exported(model) == before
    np.testing.assert_array_equal(model.predict(X, verbose=0), expected)
    other = make_model(sok)
    other.set_weights(pickle.loads(pickle.dumps(weights)))
    assert exported(other) == before
    np.testing.assert_array_equal(other.predict(X, verbose=0), expected)


def test_slots_of_keys_that_stay_are_kept(sok, model):
    """Setting back what is there changes nothing: the next steps are those of a run without it."""
    tf.keras.utils.set_random_seed(1)
    twin = make_model(sok)
    twin.set_weights(model.get_weights())
    for made in (model, twin):
        made.set_weights(made.get_weights())
        made.fit(X, Y, verbose=0, shuffle=False)
    straight = make_model(sok)
    straight.set_weights(model.get_weights())
    assert exported(straight) == exported(model)
    slots = table_of(model).snapshot().slot_rows.numpy()
    assert slots.shape[0] == 32 and slots.any()


def test_early_stopping_restores_the_best_weights(sok):
    class Watch(tf.keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            logs["watched"] = [1.0, 3.0, 2.0, 0.0][epoch]
            if epoch == 1:
                self.best = exported(self.model)

    model, watch = make_model(sok), Watch()
    stopping = tf.keras.callbacks.EarlyStopping(
        monitor="watched", mode="max", patience=2, restore_best_weights=True
    )
    model.fit(X, Y, epochs=4, verbose=0, callbacks=[watch, stopping])
    assert len(watch.best) == 32
    assert exported(model) == watch.best


def test_weights_are_no_array(model):
    weights = table_of(model).numpy()
    assert weights.keys.dtype == np.int64 and weights.rows.shape == (32, 4)
    for read in (np.asarray, np.mean, tf.convert_to_tensor):
        with pytest.raises((TypeError, ValueError), match="keys.*rows|TableWeights"):
            read(weights)
    with pytest.raises(TypeError):
        weights * 0.5


@pytest.mark.skipif(KERAS_3, reason="of tf_keras; Keras 3's files have keys")
def test_files_of_arrays_are_refused(model, tmp_path):
    file = tmp_path / "model.h5"
    file.write_bytes(b"what was there")
    for call in (model.save_weights, model.save, model.load_weights):
        with pytest.raises(NotImplementedError, match=r"hash tables.* ends in '.weights.h5'"):
            call(file)
    assert file.read_bytes() == b"what was there"


def test_what_cannot_be_set_raises(sok, model):
    weights = model.get_weights()
    with pytest.raises((ValueError, NotImplementedError)):
        model.set_weights([np.zeros([32, 4], np.float32), *weights[1:]])
    with pytest.raises(ValueError, match="rows of 3 floats"):
        sok.EmbeddingVariable(3, name="narrow").assign(weights[0])


def test_each_rank_gets_and_sets_its_shard(sok, on_threads):
    keys = np.array([-2, 3, 5, 8, 2**40])
    rows = np.arange(10, dtype=np.float32).reshape(5, 2)

    def check():
        table = sok.EmbeddingVariable(2, name="by_key_weights")
        sok.assign(table, keys, rows)
        got = table.numpy()
        assert (got.keys % 2 == sok.rank()).all()
        tf.gather(table, keys + 1)
        sok.assign(table, keys, -rows)
        table.assign(got)
        for part, expected in zip(sok.export(table), (got.keys, got.rows), strict=True):
            np.testing.assert_array_equal(part, expected)
        other = TableWeights("other", np.array([1 - sok.rank()]), np.zeros([1, 2], np.float32))
        with pytest.raises(ValueError, match=f"must be those of rank {sok.rank()}"):
            table.assign(other)
        return dict(zip(got.keys.tolist(), got.rows.tolist(), strict=True))

    before = {key: row for of_rank in on_threads(2, check) for key, row in of_rank.items()}
    assert before == dict(zip(keys.tolist(), rows.tolist(), strict=True))


# ---- exports ----


def test_an_export_raises(model, tmp_path):
    message = "'rows' cannot be part of a SavedModel.*sok.export_saved_model"
    with pytest.raises(NotImplementedError, match=message):
        tf.saved_model.save(model, tmp_path / "saved")
    with pytest.raises(NotImplementedError, match=message):
        if KERAS_3:
            model.export(tmp_path / "exported", verbose=False)
        else:
            model.save(tmp_path / "folder", save_format="tf")
    module = tf.Module()
    module.table = table_of(model)
    with pytest.raises(NotImplementedError, match=message):
        tf.saved_model.save(module, tmp_path / "module")


# ---- copies and strategies ----


def test_a_strategy_of_one_replica_trains(sok):
    strategy = tf.distribute.MirroredStrategy(["/cpu:0"])
    with strategy.scope():
        layer = sok.All2AllDenseEmbedding(
            *(None, 1, 1, 1), dynamic_input=True, embedding_initializer="ones", name="replica"
        )
        optimizer = sok.OptimizerWrapper(tf.keras.optimizers.SGD(0.5))

    def step():
        train_step(
            optimizer,
            layer.trainable_variables,
            lambda: tf.reduce_sum(layer(tf.constant([4, 4, 9], tf.int64))),
        )

    strategy.run(step)
    assert sok.export(layer.table)[1].numpy().tolist() == [[0.0], [0.5]]
