"""Keras' files, checkpoints and v1 savers on one rank."""

import shutil

import pytest
import tensorflow as tf

from sok_like.runtime.framework import hooks
from sok_like.runtime.framework.running_keras import is_keras_3
from sok_like.saving.containers import checkpoints

pytestmark = pytest.mark.keras


def test_a_rank_that_removes_a_checkpoint_second_is_silent(on_threads, tmp_path, monkeypatch):
    # Both ranks have listed the file, and another has removed it. TensorFlow's function warns then.
    monkeypatch.setattr(tf.io.gfile, "glob", lambda filespec: [filespec])
    path = tmp_path / "c-1.index"
    path.touch()
    on_threads(2, lambda *_: checkpoints.delete(pytest.fail, str(path)))
    assert not path.exists()


def test_a_checkpoint_without_its_tables_says_so(sok, tmp_path):
    v1 = tf.compat.v1
    with tf.Graph().as_default(), v1.Session() as session:
        table = sok.EmbeddingVariable(2, name="lost")
        session.run(v1.global_variables_initializer())
        path = v1.train.Saver([table]).save(session, str(tmp_path / "m"))
        shutil.rmtree(tmp_path / "m.tables")
        with pytest.raises(FileNotFoundError, match="m.tables"):
            v1.train.Saver([table]).restore(session, path)


@pytest.mark.skipif(not is_keras_3(), reason="tf_keras makes folders by TensorFlow")
@pytest.mark.parametrize("kind", ["BackupAndRestore", "ModelCheckpoint"])
def test_a_folder_that_another_rank_makes_first(sok, tmp_path, monkeypatch, kind):
    """As where several ranks have asked whether the folder is there before one has made it."""
    from keras.src.utils import file_utils

    hooks.open_door(hooks.RANKS)
    layer = sok.DistributedEmbedding("sum", None, 2, slot_num=2, max_nnz=1)
    model = tf.keras.Sequential([tf.keras.Input([2], dtype="int64"), layer])
    model.compile(sok.OptimizerWrapper(tf.keras.optimizers.SGD(0.1)), "mse")
    folder = tmp_path / "made"
    folder.mkdir()
    exists = file_utils.exists
    monkeypatch.setattr(
        file_utils, "exists", lambda path: str(path) != str(folder) and exists(path)
    )
    file = str(folder / "a.weights.h5")
    callback = (
        tf.keras.callbacks.BackupAndRestore(str(folder))
        if kind == "BackupAndRestore"
        else tf.keras.callbacks.ModelCheckpoint(file, save_weights_only=True)
    )
    keys = tf.constant([[1, 2], [3, 4]], tf.int64)
    model.fit(keys, tf.zeros([2, 2, 2]), epochs=1, verbose=0, callbacks=[callback])
    assert any(folder.iterdir())


@pytest.mark.skipif(is_keras_3(), reason="Keras 3 has no graphs of its own")
def test_keras_files_without_eager_execution_name_the_v1_saver(sok, tmp_path):
    def made():
        keys = tf.keras.Input([2], dtype="int64")
        layer = sok.DistributedEmbedding("sum", None, 4, slot_num=2, max_nnz=1, name="graph_only")
        return tf.keras.Model(keys, tf.keras.layers.Flatten()(layer(keys)))

    path, whole = str(tmp_path / "w.weights.h5"), str(tmp_path / "m.keras")
    model = made()
    model.save_weights(path)
    model.save(whole)
    with tf.Graph().as_default():
        sok.Init(global_batch_size=12, seed=7)
        model = made()
        for call in (
            lambda: model.save_weights(path),
            lambda: model.save(whole),
            lambda: model.load_weights(path),
            lambda: tf.keras.models.load_model(whole),
        ):
            with pytest.raises(NotImplementedError, match="compat.v1.train.Saver saves the model"):
                call()
