"""Checkpoints and Keras' files of distributed layers and their optimizers, on one rank.

On several ranks tests/saving/test_other_ranks.py has them.
"""

import numpy as np
import pytest
import tensorflow as tf

import sok_like
import sok_like.dist_model_parallel as dmp
from sok_like.runtime.framework.running_keras import is_keras_3
from tests import forks
from tests.dist_model_parallel.cases import assert_same

pytestmark = pytest.mark.keras
distributed, wrap = dmp.DistributedOptimizer, sok_like.OptimizerWrapper
SIZES = [(9, 4), (7, 3)]
KEYS = np.array([[1, 2], [4, 6]])


def make_layer(hashed=True):
    tables = [tf.keras.layers.Embedding(*size) for size in SIZES]
    tables += [sok_like.HashEmbedding(4, combiner="sum")] * hashed
    return dmp.DistributedEmbedding(tables)


def make_model(optimizer, hashed=False, eager=True):
    keys = [tf.keras.Input([2], dtype="int64") for _ in range(2 + hashed)]
    rows = [tf.keras.layers.Flatten()(each) for each in make_layer(hashed)(keys)]
    output = tf.keras.layers.Dense(1)(tf.keras.layers.Concatenate()(rows))
    model = tf.keras.Model(keys, output)
    model.compile(optimizer, "mse", jit_compile=False, run_eagerly=eager)
    return model


def with_hash_table(**options):
    return make_model(wrap(tf.keras.optimizers.Adam(0.1, **options)), hashed=True)


def layer_of(model):
    return next(layer for layer in model.layers if hasattr(layer, "get_optimizer_state"))


def fit(model, epochs=2):
    model.fit([KEYS] * len(model.inputs), np.ones([2, 1]), epochs=epochs, shuffle=False, verbose=0)


def predictions(model):
    return model.predict([KEYS] * len(model.inputs), verbose=0)


def test_a_layer_without_an_optimizer_is_kept(sok, tmp_path):
    layers = [make_layer(), make_layer()]
    for layer in layers:
        layer([tf.constant(KEYS)] * 3)
    path = tf.train.Checkpoint(layer=layers[0]).save(str(tmp_path / "c"))
    tf.train.Checkpoint(layer=layers[1]).restore(path).assert_existing_objects_matched()
    first, second = (layer.get_weights() for layer in layers)
    assert_same(second, first)
    assert np.abs(first[0]).max() > 0 and len(first[2][0]) == 4


def test_an_optimizer_that_is_not_built_gets_its_slot_variables(sok, tmp_path):
    trained, fresh = with_hash_table(), with_hash_table()
    fit(trained)
    path = tf.train.Checkpoint(model=trained).save(str(tmp_path / "c"))
    tf.train.Checkpoint(model=fresh).restore(path)
    fit(trained)
    fit(fresh)
    assert_same(*map(predictions, (trained, fresh)), atol=1e-6)
    first, second = (layer_of(m).get_optimizer_state(m.optimizer) for m in (trained, fresh))
    assert first["iterations"] == second["iterations"] == 4
    assert [len(slots) for slots in first["tables"]] == [2, 2, 2]
    assert_same(second["tables"], first["tables"], atol=1e-6)
    alone = tf.train.Checkpoint(layer=layer_of(fresh), optimizer=tf.keras.optimizers.Adam())
    with pytest.raises(ValueError, match="must be built before a checkpoint is restored"):
        alone.restore(path)


def test_other_tables_and_slot_variables_raise_before_anything_changes(sok, tmp_path):
    trained = with_hash_table()
    fit(trained)
    path = tf.train.Checkpoint(model=trained).save(str(tmp_path / "c"))
    other = with_hash_table(amsgrad=True)
    before = [np.array(v) for v in layer_of(other).get_weights()[:2]]
    with pytest.raises(ValueError, match="slot variables of layer"):
        tf.train.Checkpoint(model=other).restore(path)
    wide = [tf.keras.layers.Embedding(rows + 1, dim) for rows, dim in SIZES]
    wide = dmp.DistributedEmbedding(wide)
    checkpoint = tf.train.Checkpoint(layer=wide)
    written = tf.train.Checkpoint(layer=layer_of(trained)).save(str(tmp_path / "layer"))
    with pytest.raises(ValueError, match=r"shape \(9, 4\) for a table of shape \(10, 4\)"):
        checkpoint.restore(written)
    assert_same(layer_of(other).get_weights()[:2], before)


@pytest.mark.parametrize("way", ["checkpoint", "weights"])
def test_slot_variables_of_other_shapes_are_kept_on_one_rank(sok, tmp_path, way):
    """Adafactor has one number per row, and one per column."""
    models = [make_model(distributed(tf.keras.optimizers.Adafactor(0.1))) for _ in range(2)]
    for model, epochs in zip(models, (3, 1), strict=True):
        fit(model, epochs)
    if way == "checkpoint":
        path = tf.train.Checkpoint(model=models[0]).write(str(tmp_path / "c"))
        tf.train.Checkpoint(model=models[1]).read(path).assert_existing_objects_matched()
    else:
        models[0].save_weights(tmp_path / "w.weights.h5")
        models[1].load_weights(tmp_path / "w.weights.h5")
    for model in models:
        fit(model)
    # TensorFlow adds up what Adafactor divides by in an order that two threads do not repeat.
    assert_same(*map(predictions, models), atol=1e-6)


def test_files_of_keras_with_other_tables_raise_and_with_another_optimizer_warn(sok, tmp_path):
    path, kinds = tmp_path / "w.weights.h5", tf.keras.optimizers
    model = make_model(distributed(kinds.Adam(0.1)))
    other = make_model(distributed(kinds.SGD(0.1, momentum=0.9)))
    fit(model)
    fit(other)
    model.save_weights(path)
    with pytest.warns(UserWarning, match="of layer .* the slot variables"):
        other.load_weights(path)
    assert_same(*map(predictions, (model, other)))
    wide = [tf.keras.layers.Embedding(rows + 1, dim) for rows, dim in SIZES]
    layers = [dmp.DistributedEmbedding(tables) for tables in (wide, wide[:1], [*wide, *wide[:1]])]
    few, many = (r"\['\(unnamed\)'" + n * r", '\(unnamed\)'" + r"\]" for n in (0, 2))
    matches = (r"shape \(9, 4\) for", f"{few}.*Received: ", f"{many}.*Received: ")
    for layer, match in zip(layers, matches, strict=True):
        inputs = [tf.keras.Input([2], dtype="int64") for _ in layer.get_weights()]
        outer = tf.keras.Model(inputs, layer(inputs))
        before = layer.get_weights()
        with pytest.raises(ValueError, match=match):
            outer.load_weights(path)
        assert_same(layer.get_weights(), before)


def test_tables_of_layers_in_a_list_are_not_left_out(sok, tmp_path):
    class Listed(tf.keras.Model):
        def __init__(self, layer):
            super().__init__()
            self.parts = [layer]

        def call(self, keys):
            rows = self.parts[0](keys)
            return rows[0] if isinstance(rows, list) else rows

    keys = tf.constant(KEYS)
    sok1 = sok.DistributedEmbedding("sum", None, 4, slot_num=2, max_nnz=1)
    for model, value in ((Listed(sok1), keys), (Listed(make_layer()), [keys] * 3)):
        model(value)
        checkpoint = tf.train.Checkpoint(model=model)
        if is_keras_3():
            with pytest.raises(ValueError, match="not those in a list.*export_saved_model"):
                checkpoint.save(str(tmp_path / "c"))
        else:
            path = checkpoint.save(str(tmp_path / "c"))
            expected = model(value, training=False).numpy()
            again = Listed(type(model.parts[0]).from_config(model.parts[0].get_config()))
            again(value)
            tf.train.Checkpoint(model=again).restore(path)
            np.testing.assert_array_equal(again(value, training=False).numpy(), expected)


def scaled(optimizer):
    cls = tf.keras.optimizers if is_keras_3() else tf.keras.mixed_precision
    return cls.LossScaleOptimizer(optimizer, initial_scale=8.0)


def with_schedule():
    rate = tf.keras.optimizers.schedules.ExponentialDecay(0.1, 3, 0.5)
    return distributed(tf.keras.optimizers.Adam(rate, beta_1=0.8), sparse_as_dense=True)


def scaled_adam():
    stock = tf.keras.optimizers.Adam(0.1)
    return distributed(scaled(stock)) if is_keras_3() else scaled(distributed(stock))


OPTIMIZERS = {
    "schedule": with_schedule,
    "momentum": lambda: distributed(tf.keras.optimizers.SGD(0.1, momentum=0.9)),
    "wrapped": lambda: distributed(wrap(tf.keras.optimizers.Adam(), lazy=True)),
    "scaled": scaled_adam,
    "wrapped around scaled": lambda: wrap(scaled(tf.keras.optimizers.Adam())),
}


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_a_loaded_model_trains_on_and_a_clone_starts_anew(sok, tmp_path, kind):
    # One is traced: that takes longer than the steps.
    model = make_model(OPTIMIZERS[kind](), eager=kind != "wrapped")
    fit(model)
    cloned = tf.keras.models.clone_model(model)
    assert np.isfinite(predictions(cloned)).all()
    model.save(tmp_path / "m.keras")
    loaded = tf.keras.models.load_model(tmp_path / "m.keras")
    # tf_keras does not compile clones.
    for other, steps in ((loaded, 2), *([(cloned, 0)] if is_keras_3() else [])):
        assert type(other.optimizer) is type(model.optimizer)
        assert other.optimizer.get_config() == model.optimizer.get_config()
        assert int(tf.convert_to_tensor(other.optimizer.iterations)) == steps
    fit(loaded)
    fit(model)
    np.testing.assert_array_equal(*map(predictions, (loaded, model)))


def test_a_new_process_makes_the_optimizer_again(sok, tmp_path):
    model = make_model(OPTIMIZERS["wrapped"]())
    fit(model)
    path = str(tmp_path / "m.keras")
    model.save(path)
    lines = f"""
import sok_like
import numpy as np
import tensorflow as tf
model = tf.keras.models.load_model({path!r})
assert type(model.optimizer).__name__ == "DistributedEmbeddingAwareAdam"
assert int(tf.convert_to_tensor(model.optimizer.iterations)) == 2
print(model.predict([np.array({KEYS.tolist()})] * 2, verbose=0).ravel().tolist())
"""
    done = forks.run("-c", lines)
    assert done.returncode == 0, done.stderr
    found = eval(done.stdout.strip().splitlines()[-1])
    np.testing.assert_array_equal(np.array(found, np.float32), predictions(model).ravel())
