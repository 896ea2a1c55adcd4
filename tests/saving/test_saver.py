"""`sok.Saver` on one rank: dense values, full disks, and file systems that TensorFlow writes."""

import pathlib
import re

import numpy as np
import pytest
import tensorflow as tf

from sok_like.saving.format import durable, shard_file
from tests.training import rows_by_key

pytestmark = pytest.mark.keras


@pytest.fixture
def table(sok):
    """A table with keys that no single part of a file holds, and what it has after two calls."""
    table = sok.EmbeddingVariable(4, name="elsewhere")
    rows = np.random.default_rng(0).standard_normal((3000, 4)).astype(np.float32)
    sok.assign(table, np.arange(3000) * 7 - 3, rows)
    return table


def test_a_chain_in_memory_is_restored_compacted_and_verified(sok, table, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    saver, folder = sok.Saver(), f"ram://{tmp_path.name}/model"
    saver.dump(table, folder)
    sok.assign(table, [4, 5], tf.zeros([2, 4]))
    table.erase([-3])
    saver.dump(table, folder, since="last")
    assert len(tf.io.gfile.listdir(folder)) == 3
    expected = rows_by_key(table)
    for call in (saver.restore, saver.compact, saver.restore):
        if call == saver.restore:
            table.clear()
        call(table, folder)
        assert rows_by_key(table) == expected
    left = tf.io.gfile.listdir(folder)
    assert len(left) == 2  # the two that it has replaced are gone
    (name,) = (name for name in left if name.endswith(".npz"))
    data = bytearray(durable.read(f"{folder}/{name}"))
    data[-9000] ^= 1
    durable.write(f"{folder}/{name}", bytes(data))
    with pytest.raises(RuntimeError, match=rf"{folder}/{name} must be a whole.*checksum"):
        saver.restore(table, folder)
    assert rows_by_key(table) == expected
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("path", ["s3://bucket/model", "hdfs://host/model", "nowhere://x"])
def test_a_scheme_without_a_file_system_raises_and_leaves_no_folder(
    sok, table, path, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    saver, scheme = sok.Saver(), path.partition("://")[0]
    calls = [saver.dump, saver.dump_to_file, saver.restore, saver.restore_from_file, saver.compact]
    for call in [*calls, lambda *given: saver.dump(*given, since="last")]:
        with pytest.raises(RuntimeError, match=f"no file system is registered for '{scheme}'"):
            call(table, path)
    assert list(tmp_path.iterdir()) == []


def test_dense_values(sok):
    table = sok.EmbeddingVariable(4, name="items")
    blocks = [np.arange(8, dtype=np.float32).reshape(2, 4), np.ones([3, 4], np.float32)]
    assert sok.Saver().load_embedding_values(table, blocks).numpy() == b"OK"
    keys, rows = sok.export(table)
    assert keys.numpy().tolist() == [0, 1, 2, 3, 4]
    np.testing.assert_array_equal(rows, np.concatenate(blocks))


@pytest.mark.skipif(not pathlib.Path("/dev/full").exists(), reason="needs /dev/full")
@pytest.mark.parametrize("method", ["dump_to_file", "dump", "delta"])
def test_a_full_disk_names_file_and_table(sok, tmp_path, monkeypatch, method):
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
    assert sorted(tmp_path.iterdir()) == files
    dumps.restore(table, tmp_path)
    assert (sok.export(table)[1].numpy() == 1).all()
