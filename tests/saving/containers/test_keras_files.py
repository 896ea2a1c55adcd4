"""Keras' files, checkpoints and v1 savers on one rank; layers of a user's own in them."""

import numpy as np
import pytest
import tensorflow as tf

import sok_like as sok
from sok_like.runtime.framework import hooks
from sok_like.runtime.framework.running_keras import is_keras_3
from sok_like.saving import transaction
from sok_like.saving.containers import checkpoints
from sok_like.saving.format import checksums
from tests.checks import files
from tests.checks.files import Pair, check_same, everything
from tests.saving import fuzz

pytestmark = pytest.mark.keras
MUTATIONS = {"weights": 50, "model": 20, "checkpoint": 40}


def test_a_rank_that_removes_a_checkpoint_second_is_silent(on_threads, tmp_path, monkeypatch):
    # Both ranks have listed the file, and another has removed it. TensorFlow's function warns then.
    monkeypatch.setattr(tf.io.gfile, "glob", lambda filespec: [filespec])
    path = tmp_path / "c-1.index"
    path.touch()
    on_threads(2, lambda *_: checkpoints.delete(pytest.fail, str(path)))
    assert not path.exists()


@pytest.mark.skipif(not is_keras_3(), reason="tf_keras makes folders by TensorFlow")
def test_a_folder_that_another_rank_makes_first(sok, tmp_path, monkeypatch):
    """As where several ranks have asked whether the folder is there before one has made it."""
    from keras.src.utils import file_utils

    hooks.open_door(hooks.RANKS)
    layer = sok.DistributedEmbedding("sum", None, 2, slot_num=2, max_nnz=1)
    model = tf.keras.Sequential([tf.keras.Input([2], dtype="int64"), layer])
    model.compile(sok.OptimizerWrapper(tf.keras.optimizers.SGD(0.1)), "mse")
    folders, exists = [tmp_path / "backup", tmp_path / "saved"], file_utils.exists
    for folder in folders:
        folder.mkdir()
    unseen = {*map(str, folders)}
    monkeypatch.setattr(file_utils, "exists", lambda path: str(path) not in unseen and exists(path))
    weights = tf.keras.callbacks.ModelCheckpoint(
        str(folders[1] / "a.weights.h5"), save_weights_only=True
    )
    callbacks = [tf.keras.callbacks.BackupAndRestore(str(folders[0])), weights]
    keys = tf.constant([[1, 2], [3, 4]], tf.int64)
    model.fit(keys, tf.zeros([2, 2, 2]), epochs=1, verbose=0, callbacks=callbacks)
    assert all(any(folder.iterdir()) for folder in folders)


@pytest.mark.skipif(is_keras_3(), reason="Keras 3 has no graphs of its own")
def test_keras_files_without_eager_execution_name_the_v1_saver(sok, tmp_path):
    def in_graph():
        keys = tf.keras.Input([2], dtype="int64")
        layer = sok.DistributedEmbedding("sum", None, 4, slot_num=2, max_nnz=1, name="graph_only")
        return tf.keras.Model(keys, tf.keras.layers.Flatten()(layer(keys)))

    path, whole = str(tmp_path / "w.weights.h5"), str(tmp_path / "m.keras")
    files.write(in_graph(), tmp_path, ["weights", "model"])
    with tf.Graph().as_default():
        sok.Init(global_batch_size=12, seed=7)
        model = in_graph()
        for call in (
            lambda: model.save_weights(path),
            lambda: model.save(whole),
            lambda: model.load_weights(path),
            lambda: tf.keras.models.load_model(whole),
        ):
            with pytest.raises(NotImplementedError, match="compat.v1.train.Saver saves the model"):
                call()


# ---- layers of a user's own ----


def made(bare=False):
    """Tables of the user's in a layer, and in one of a nested model."""
    tf.keras.utils.set_random_seed(3)
    keys = tf.keras.Input([2], dtype="int64")
    one = Pair(bare=bare, name="one")
    inner_keys = tf.keras.Input([2], dtype="int64")
    inner = Pair(bare=bare, name="nested")(inner_keys)
    nested = tf.keras.Model(inner_keys, tf.keras.layers.Dense(3, name="inner")(inner))
    both = tf.keras.layers.Concatenate()([one(keys), nested(keys)])
    model = tf.keras.Model(keys, tf.keras.layers.Dense(1, name="outer")(both))
    optimizer = sok.OptimizerWrapper(tf.keras.optimizers.Adam(0.05))
    model.compile(optimizer, "mse", run_eagerly=True)
    return model


def written(model, folder, kinds=files.KINDS):
    """What a trained model has written."""
    files.fit(model, 2)
    files.write(model, folder, kinds)
    before = everything(model)
    assert len(before["tables"]) == 4
    assert all(len(content["keys"]) for content in before["tables"].values())
    return before


@pytest.mark.parametrize(
    "kind, bare", [*((kind, False) for kind in files.KINDS), ("weights", True), ("model", True)]
)
def test_what_was_written_is_read(sok, tmp_path, kind, bare):
    before = written(made(bare), tmp_path, [kind])
    check_same(everything(files.read(kind, tmp_path, lambda: made(bare))), before, kind)


@pytest.mark.skipif(not is_keras_3(), reason="tf_keras tracks variables as they are")
def test_a_table_assigned_to_a_built_layer_says_so(sok):
    layer = Pair()
    layer(tf.constant([[1, 2]], tf.int64))
    with pytest.raises(ValueError, match="already built"):
        layer.late = sok.EmbeddingVariable(2, name="late")


def test_a_table_that_two_layers_share(sok, tmp_path):
    def shared():
        table = sok.EmbeddingVariable(4, name="shared")
        keys = tf.keras.Input([2], dtype="int64")
        layers = [Pair(table=table, name=name) for name in ("left", "right")]
        return tf.keras.Model(keys, sum(layer(keys) for layer in layers))

    model, path = shared(), str(tmp_path / "s.weights.h5")
    keys = np.arange(6).reshape(3, 2)
    model(keys, training=True)
    table = files.tables_of(model)[0]
    sok.assign(table, [0, 1, 9], tf.random.normal([3, 4]))
    model.save_weights(path)
    other = shared()
    other.load_weights(path)
    check_same(everything(other), everything(model), "shared")
    np.testing.assert_array_equal(other(keys, training=False), model(keys, training=False))


def one_layer():
    keys = tf.keras.Input([2], dtype="int64")
    return tf.keras.Model(keys, Pair(name="one")(keys))


def test_ranks_load_a_model_together_whoever_made_its_layers(sok, tmp_path, monkeypatch):
    path, stock = str(tmp_path / "m.keras"), str(tmp_path / "stock.keras")
    model = one_layer()
    model(np.array([[1, 2]]), training=True)
    model.save(path)  # not compiled, so its configuration does not name this package
    tf.keras.Sequential([tf.keras.Input([2]), tf.keras.layers.Dense(1)]).save(stock)
    together, own = [], transaction.load

    def load(*args, **kwargs):
        together.append(kwargs["collective"])
        return own(*args, **kwargs)

    monkeypatch.setattr(transaction, "load", load)
    other = tf.keras.models.load_model(path)
    check_same(everything(other), everything(model), "model")
    tf.keras.models.load_model(stock)
    assert together == [True, False]


@pytest.mark.parametrize("kind", files.KINDS)
def test_a_damaged_file_is_refused_or_its_tables_are_right(sok, tmp_path, kind):
    """`make fuzz` runs more."""
    counts, wrong = fuzz.Files(tmp_path).run(kind, MUTATIONS[kind], 1)
    assert not wrong, wrong
    assert any(found == "refused" for _, found in counts)


def test_a_table_without_a_checksum_is_refused(sok, tmp_path, monkeypatch):
    def write(store, arrays, prefix=""):
        for name, array in arrays:
            store[prefix + name] = array

    model, path = one_layer(), str(tmp_path / "w.weights.h5")
    with monkeypatch.context() as patched:
        patched.setattr(checksums, "write_arrays", write)
        model.save_weights(path)
    with pytest.raises(ValueError, match="must hold the checksum of table 'one_a'"):
        one_layer().load_weights(path)
