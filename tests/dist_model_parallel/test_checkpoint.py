"""`tf.train.Checkpoint` of distributed layers on one rank; on several table/test_other_ranks.py."""

import numpy as np
import pytest
import tensorflow as tf

pytestmark = pytest.mark.keras
SIZES = [(9, 4), (7, 3)]
KEYS = np.array([[1, 2], [4, 6]])


def make_layer(sok, hashed=True):
    tables = [tf.keras.layers.Embedding(*size) for size in SIZES]
    tables += [sok.HashEmbedding(4, combiner="sum")] * hashed
    return sok.dist_model_parallel.DistributedEmbedding(tables)


def make_model(sok, optimizer, hashed=True):
    keys = [tf.keras.Input([2], dtype="int64") for _ in range(2 + hashed)]
    rows = [tf.keras.layers.Flatten()(each) for each in make_layer(sok, hashed)(keys)]
    output = tf.keras.layers.Dense(1)(tf.keras.layers.Concatenate()(rows))
    model = tf.keras.Model(keys, output)
    wrap = sok.OptimizerWrapper if hashed else sok.dist_model_parallel.DistributedOptimizer
    model.compile(wrap(optimizer), "mse", run_eagerly=True)
    return model


def layer_of(model):
    return next(layer for layer in model.layers if hasattr(layer, "get_optimizer_state"))


def fit(model, epochs=2):
    model.fit([KEYS] * len(model.inputs), np.ones([2, 1]), epochs=epochs, verbose=0)


def predictions(model):
    return model.predict([KEYS] * len(model.inputs), verbose=0)


def check_same(found, expected, atol=0.0):
    for mine, theirs in zip(tf.nest.flatten(found), tf.nest.flatten(expected), strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=0, atol=atol)


def test_a_layer_without_an_optimizer_is_kept(sok, tmp_path):
    layers = [make_layer(sok), make_layer(sok)]
    for layer in layers:
        layer([tf.constant(KEYS)] * 3)
    path = tf.train.Checkpoint(layer=layers[0]).save(str(tmp_path / "c"))
    tf.train.Checkpoint(layer=layers[1]).restore(path).assert_existing_objects_matched()
    first, second = (layer.get_weights() for layer in layers)
    check_same(second, first)
    assert np.abs(first[0]).max() > 0 and len(first[2][0]) == 4


def test_an_optimizer_that_is_not_built_gets_its_slot_variables(sok, tmp_path):
    trained, fresh = (make_model(sok, tf.keras.optimizers.Adam(0.1)) for _ in range(2))
    fit(trained)
    path = tf.train.Checkpoint(model=trained).save(str(tmp_path / "c"))
    tf.train.Checkpoint(model=fresh).restore(path)
    fit(trained)
    fit(fresh)
    check_same(*map(predictions, (trained, fresh)), atol=1e-6)
    first, second = (layer_of(m).get_optimizer_state(m.optimizer) for m in (trained, fresh))
    assert first["iterations"] == second["iterations"] == 4
    assert [len(slots) for slots in first["tables"]] == [2, 2, 2]
    check_same(second["tables"], first["tables"], atol=1e-6)
    alone = tf.train.Checkpoint(layer=layer_of(fresh), optimizer=tf.keras.optimizers.Adam())
    with pytest.raises(ValueError, match="must be built before a checkpoint is restored"):
        alone.restore(path)


def test_other_tables_and_slot_variables_raise_before_anything_changes(sok, tmp_path):
    trained = make_model(sok, tf.keras.optimizers.Adam(0.1))
    fit(trained)
    path = tf.train.Checkpoint(model=trained).save(str(tmp_path / "c"))
    other = make_model(sok, tf.keras.optimizers.Adam(0.1, amsgrad=True))
    before = [np.array(v) for v in layer_of(other).get_weights()[:2]]
    with pytest.raises(ValueError, match="slot variables of layer"):
        tf.train.Checkpoint(model=other).restore(path)
    wide = [tf.keras.layers.Embedding(rows + 1, dim) for rows, dim in SIZES]
    wide = sok.dist_model_parallel.DistributedEmbedding(wide)
    checkpoint = tf.train.Checkpoint(layer=wide)
    written = tf.train.Checkpoint(layer=layer_of(trained)).save(str(tmp_path / "layer"))
    with pytest.raises(ValueError, match=r"shape \(9, 4\) for a table of shape \(10, 4\)"):
        checkpoint.restore(written)
    check_same(layer_of(other).get_weights()[:2], before)


@pytest.mark.parametrize("way", ["checkpoint", "weights"])
def test_slot_variables_of_other_shapes_are_kept_on_one_rank(sok, tmp_path, way):
    """Adafactor has one number per row, and one per column."""
    models = [make_model(sok, tf.keras.optimizers.Adafactor(0.1), hashed=False) for _ in range(2)]
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
    check_same(*map(predictions, models), atol=1e-6)


def test_files_of_keras_with_other_tables_raise_and_with_another_optimizer_warn(sok, tmp_path):
    path, kinds = tmp_path / "w.weights.h5", tf.keras.optimizers
    model, other = (
        make_model(sok, optimizer, hashed=False)
        for optimizer in (kinds.Adam(0.1), kinds.SGD(0.1, momentum=0.9))
    )
    fit(model)
    fit(other)
    model.save_weights(path)
    with pytest.warns(UserWarning, match="of layer .* the slot variables"):
        other.load_weights(path)
    check_same(*map(predictions, (model, other)))
    wide = [tf.keras.layers.Embedding(rows + 1, dim) for rows, dim in SIZES]
    layers = [
        sok.dist_model_parallel.DistributedEmbedding(tables)
        for tables in (wide, wide[:1], [*wide, *wide[:1]])
    ]
    few, many = (r"\['\(unnamed\)'" + n * r", '\(unnamed\)'" + r"\]" for n in (0, 2))
    matches = (r"shape \(9, 4\) for", f"{few}.*Received: ", f"{many}.*Received: ")
    for layer, match in zip(layers, matches, strict=True):
        inputs = [tf.keras.Input([2], dtype="int64") for _ in layer.get_weights()]
        outer = tf.keras.Model(inputs, layer(inputs))
        before = layer.get_weights()
        with pytest.raises(ValueError, match=match):
            outer.load_weights(path)
        check_same(layer.get_weights(), before)


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
    for model, value in ((Listed(sok1), keys), (Listed(make_layer(sok)), [keys] * 3)):
        model(value)
        checkpoint = tf.train.Checkpoint(model=model)
        if hasattr(tf.keras, "version"):  # Keras 3
            with pytest.raises(ValueError, match="not those in a list.*export_saved_model"):
                checkpoint.save(str(tmp_path / "c"))
        else:
            path = checkpoint.save(str(tmp_path / "c"))
            expected = model(value, training=False).numpy()
            again = Listed(type(model.parts[0]).from_config(model.parts[0].get_config()))
            again(value)
            tf.train.Checkpoint(model=again).restore(path)
            np.testing.assert_array_equal(again(value, training=False).numpy(), expected)
