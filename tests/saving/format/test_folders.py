"""What a file says about the folders beside it is one plain name, and links are not followed."""

import contextlib
import os
import shutil

import h5py
import numpy as np
import pytest
import tensorflow as tf

from sok_like.runtime.framework.running_keras import is_keras_3
from sok_like.saving.format import folders
from sok_like.table import snapshots
from sok_like.table.variable import EmbeddingVariable

ELSEWHERE = "elsewhere.0123456789abcdef"
v1 = tf.compat.v1


@pytest.fixture
def table(sok, tmp_path):
    """A table, and a dump of it that lies beside the folders `*.tables`, not in one."""
    model, layer = made(sok)
    sok.assign(layer.table, [1, 2], tf.ones([2, 2]))
    sok.Saver().dump_to_file(layer.table, tmp_path / ELSEWHERE)
    layer.table.clear()
    return model, layer


def made(sok):
    layer = sok.DistributedEmbedding("sum", None, 2, slot_num=1, max_nnz=1, name="referred")
    keys = tf.keras.Input([1], dtype="int64")
    return tf.keras.Model(keys, layer(keys)), layer


def by_keras(model, layer, path, reference, monkeypatch):
    model.save_weights(f"{path}.weights.h5")
    with h5py.File(f"{path}.weights.h5", "a") as file:
        found = []
        file.visit(lambda name: found.append(name) if name.endswith("slot_widths") else None)
        group = file[os.path.dirname(found[0])]
        for name in list(group):
            del group[name]
        group["beside"] = np.frombuffer(reference.encode(), np.uint8)
    return lambda: model.load_weights(f"{path}.weights.h5")


def by_checkpoint(model, layer, path, reference, monkeypatch):
    with monkeypatch.context() as patched:
        referring = lambda table: snapshots.referring(table, reference)  # noqa: E731
        patched.setattr(EmbeddingVariable, "_serialize_to_tensors", referring)
        tf.train.Checkpoint(layer=layer).write(str(path))
    return lambda: tf.train.Checkpoint(layer=layer).read(str(path))


@pytest.mark.parametrize("way", [by_keras, by_checkpoint])
@pytest.mark.parametrize("reference", ["../{}", "{here}/{}", "a/../../{}", "..", ".", ""])
def test_a_reference_leads_nowhere_else(table, tmp_path, monkeypatch, way, reference):
    reference = reference.format(ELSEWHERE, here=tmp_path)
    load = way(*table, tmp_path / "m", reference, monkeypatch)
    os.makedirs(tmp_path / "m.tables" / "a", exist_ok=True)
    os.makedirs(tmp_path / "m.weights.h5.tables" / "a", exist_ok=True)
    with pytest.raises((ValueError, tf.errors.OpError), match="one plain name"):
        load()
    assert int(table[1].table.size()) == 0


@contextlib.contextmanager
def in_session(sok, path):
    """A v1 Saver has a dump beside its file on one rank, too."""
    with tf.Graph().as_default(), v1.Session() as session:
        variable = sok.EmbeddingVariable(2, name="linked")
        session.run(v1.global_variables_initializer())
        fill, clear = sok.assign(variable, [1], [[1.0, 1.0]]), variable.clear()
        size, saver = variable.size(), v1.train.Saver()
        session.run(fill)
        saver.save(session, path)
        session.run(clear)
        yield session, saver, size


def linked(path):
    """Moves a file or folder elsewhere and leaves a link in its place."""
    os.rename(path, f"{path}.moved")
    os.symlink(f"{path}.moved", path)


@pytest.mark.parametrize("which", ["tables", "dump", "shard"])
def test_links_are_not_followed(sok, tmp_path, which):
    path = str(tmp_path / "m")
    with in_session(sok, path) as (session, saver, size):
        (dump,) = (tmp_path / "m.tables").iterdir()
        (shard,) = dump.glob("*.npz")
        linked({"tables": tmp_path / "m.tables", "dump": dump, "shard": shard}[which])
        with pytest.raises(ValueError, match="no link"):
            saver.restore(session, path)
        assert session.run(size) == 0


def test_a_checkpoint_without_its_tables_says_so(sok, tmp_path):
    with in_session(sok, str(tmp_path / "m")) as (session, saver, _):
        shutil.rmtree(tmp_path / "m.tables")
        with pytest.raises(FileNotFoundError, match="m.tables"):
            saver.restore(session, str(tmp_path / "m"))


def test_a_save_removes_nothing_behind_a_link_and_nothing_of_others(sok, tmp_path):
    path = str(tmp_path / "m")
    with in_session(sok, path) as (session, saver, _):
        others = tmp_path / "m.tables" / "of_others"
        others.mkdir()
        saver.save(session, path)
        assert others.is_dir() and len(list((tmp_path / "m.tables").iterdir())) == 2
        linked(tmp_path / "m.tables")
        before = sorted(os.listdir(tmp_path / "m.tables.moved"))
        with pytest.raises(ValueError, match="no link"):
            saver.save(session, path)
        folders.remove_all(path)
        assert sorted(os.listdir(tmp_path / "m.tables.moved")) == before


@pytest.mark.skipif(not is_keras_3(), reason="tf_keras writes HDF5 files to local disks only")
def test_weights_in_memory_and_a_missing_file_on_one_process(sok, tmp_path):
    """`ram://` is a file system of TensorFlow's."""
    model, layer = made(sok)
    sok.assign(layer.table, [1, 2], tf.ones([2, 2]))
    model.save_weights("ram://references.weights.h5")
    layer.table.clear()
    model.load_weights("ram://references.weights.h5")
    assert sorted(sok.export(layer.table)[0].numpy()) == [1, 2]
    with pytest.raises(FileNotFoundError) as raised:
        model.load_weights(str(tmp_path / "missing.weights.h5"))
    assert "missing.weights.h5" in str(raised.value) and "rank" not in str(raised.value)
