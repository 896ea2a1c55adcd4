"""Keras' files, checkpoints and v1 savers on one rank; tests/checks/files.py has the others."""

import os
import subprocess
import sys

import numpy as np
import pytest
import tensorflow as tf

from sok_like.runtime.framework import hooks
from sok_like.runtime.framework.running_keras import is_keras_3
from sok_like.saving.containers import checkpoints
from tests.checks import files

pytestmark = pytest.mark.keras


def test_a_save_that_fails_leaves_the_file_before(sok, tmp_path, monkeypatch):
    model = files.made()
    files.fit(model, 1)
    path = tmp_path / "w.weights.h5"
    model.save_weights(str(path))
    whole = path.read_bytes()
    files.fit(model, 1)
    monkeypatch.setattr(os, "fsync", lambda _: (_ for _ in ()).throw(OSError(28, "full")))
    with pytest.raises(OSError, match="full"):
        model.save_weights(str(path))
    assert path.read_bytes() == whole and [p.name for p in tmp_path.iterdir()] == [path.name]


def test_v1_savers_keep_tables_by_dump(sok, tmp_path):
    first, unbroken = files._train_session(tmp_path / "unbroken", 4)
    files._train_session(tmp_path / "resumed", 2)
    again, resumed = files._train_session(tmp_path / "resumed", 4)
    assert (first, again) == (0, 2)
    for mine, expected in zip(resumed, unbroken, strict=True):
        np.testing.assert_array_equal(mine, expected)
    (folder,) = (tmp_path / "resumed" / "model.ckpt-4.tables").iterdir()
    table = sok.EmbeddingVariable(4, name="in_session")
    sok.Saver().restore_from_file(table, folder)  # it is a dump as any other
    np.testing.assert_array_equal(sok.export(table)[0], unbroken[0])


def test_v1_savers_remove_tables_with_their_checkpoints(sok, tmp_path):
    v1 = tf.compat.v1
    with tf.Graph().as_default(), v1.Session() as session:
        table = sok.EmbeddingVariable(2, name="removed")
        session.run(v1.global_variables_initializer())
        saver = v1.train.Saver(max_to_keep=1)
        for step in range(3):
            session.run(sok.assign(table, [step], [[1.0, 1.0]]))
            saver.save(session, str(tmp_path / "m"), global_step=step)
        session.run(table.clear())
        saver.restore(session, tf.train.latest_checkpoint(str(tmp_path)))
        assert session.run(table.size()) == 3
    tables = [path.name for path in tmp_path.iterdir() if path.name.endswith(".tables")]
    assert tables == ["m-2.tables"]


def test_a_rank_that_removes_a_checkpoint_second_is_silent(on_threads, tmp_path, monkeypatch):
    # Both ranks have listed the file, and another has removed it. TensorFlow's function warns then.
    monkeypatch.setattr(tf.io.gfile, "glob", lambda filespec: [filespec])
    path = tmp_path / "c-1.index"
    path.touch()
    on_threads(2, lambda *_: checkpoints.delete(pytest.fail, str(path)))
    assert not path.exists()


def test_a_checkpoint_without_its_tables_says_so(sok, tmp_path):
    import shutil

    v1 = tf.compat.v1
    with tf.Graph().as_default(), v1.Session() as session:
        table = sok.EmbeddingVariable(2, name="lost")
        session.run(v1.global_variables_initializer())
        path = v1.train.Saver([table]).save(session, str(tmp_path / "m"))
        shutil.rmtree(tmp_path / "m.tables")
        with pytest.raises(FileNotFoundError, match="m.tables"):
            v1.train.Saver([table]).restore(session, path)


_KILLED = """
import os, sys
import tensorflow as tf
import sok_like as sok
from sok_like.runtime.framework import hooks
from sok_like.runtime.framework.running_keras import is_keras_3
from tests.checks import files

sok.Init(global_batch_size=12, seed=7)
model = files.made()
for step in range(10000):
    files.fit(model, 1)
    model.save_weights(sys.argv[1])
    print("saved", flush=True)
"""


@pytest.mark.keras(slow=True)
def test_a_process_that_is_killed_leaves_a_file_that_loads(sok, tmp_path, after=3):
    path = str(tmp_path / "w.weights.h5")
    command = [sys.executable, "-c", _KILLED, path]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        for _ in range(after):
            assert process.stdout.readline() == "saved\n"
        process.kill()
    model = files.made()
    files.fit(model, 1)
    model.load_weights(path)
    assert int(tf.convert_to_tensor(model.optimizer.iterations)) >= after


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
