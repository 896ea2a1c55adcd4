"""`sok.Saver` on one rank: full disks, schemes without a file system, its place in a program."""

import pathlib
import re
import time

import numpy as np
import pytest
import tensorflow as tf

from sok_like.saving.format import manifest, shard_file
from sok_like.table import table_reader
from tests.training import apply_gradient, rows_by_key


@pytest.mark.keras
def test_a_scheme_without_a_file_system_raises_and_leaves_no_folder(sok, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    table, saver = sok.EmbeddingVariable(4, name="elsewhere"), sok.Saver()
    calls = [saver.dump, saver.dump_to_file, saver.restore, saver.restore_from_file, saver.compact]
    for call in [*calls, lambda *given: saver.dump(*given, since="last")]:
        with pytest.raises(RuntimeError, match="no file system is registered for 'nowhere'"):
            call(table, "nowhere://bucket/model")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.keras
@pytest.mark.skipif(not pathlib.Path("/dev/full").exists(), reason="needs /dev/full")
@pytest.mark.parametrize("method", ["dump_to_file", "dump", "delta"])
def test_a_full_disk_names_file_and_table(sok, tmp_path, monkeypatch, capfd, method):
    table, dumps = sok.EmbeddingVariable(2, name="users"), sok.Saver()
    sok.assign(table, range(6), tf.ones([6, 2]))
    dumps.dump(table, tmp_path)
    files = sorted(tmp_path.iterdir())
    sok.assign(table, range(6), tf.zeros([6, 2]))
    write = shard_file.write_shard

    def to_a_full_device(folder, name, *arguments):
        (pathlib.Path(folder) / f"{name}.tmp").symlink_to("/dev/full")
        return write(folder, name, *arguments)

    monkeypatch.setattr(shard_file, "write_shard", to_a_full_device)
    arguments = {"since": "last"} if method == "delta" else {}
    call = dumps.dump_to_file if method == "dump_to_file" else dumps.dump
    with pytest.raises(RuntimeError, match=rf"(?s)'users'.*{tmp_path}") as raised:
        call(table, tmp_path, **arguments)
    assert re.search(r"No space left on device.*\.npz", str(raised.value))
    del raised
    assert "Exception ignored" not in capfd.readouterr().err  # it is told once
    assert sorted(tmp_path.iterdir()) == files
    dumps.restore(table, tmp_path)
    assert (sok.export(table)[1].numpy() == 1).all()


# ---- within a tf.function: between what stands before it and after it ----


def slow(monkeypatch, module, name):
    """A function that gives ops which do not wait for it the time to come first."""
    own = getattr(module, name)

    def function(*arguments, **keywords):
        time.sleep(0.3)
        return own(*arguments, **keywords)

    monkeypatch.setattr(module, name, function)


def write(sok, table, value, keys=(1, 2)):
    sok.assign(table, tf.constant(keys, tf.int64), tf.fill([len(keys), 2], value))


def test_what_stands_in_one_program_comes_in_its_order(sok, tmp_path, monkeypatch):
    table, saver = sok.EmbeddingVariable(2, name="ordered"), sok.Saver()
    optimizer = sok.OptimizerWrapper(tf.keras.optimizers.SGD(1.0))
    write(sok, table, 0.0)
    apply_gradient(optimizer, table, [1, 2])

    @tf.function
    def program():
        write(sok, table, 1.0)
        write(sok, table, 2.0, keys=(2,))
        apply_gradient(optimizer, table, [1, 2])
        saver.dump_to_file(table, tmp_path)
        apply_gradient(optimizer, table, [1, 2])
        write(sok, table, 3.0, keys=(1,))
        rows = [sok.export(table)[1]]
        saver.restore(table, tmp_path)
        rows.append(sok.export(table)[1])
        write(sok, table, 4.0, keys=(1,))
        return [*rows, sok.export(table)[1]]

    slow(monkeypatch, table_reader, "content")
    slow(monkeypatch, manifest, "write_manifest")
    found = [rows.numpy()[:, 0].tolist() for rows in program()]
    assert found == [[3.0, 0.0], [0.0, 1.0], [4.0, 1.0]]
    saver.restore(table, tmp_path)
    assert rows_by_key(table) == {1: [0.0, 0.0], 2: [1.0, 1.0]}
    assert int(np.asarray(table.snapshot().optimizer_step)) == 2
