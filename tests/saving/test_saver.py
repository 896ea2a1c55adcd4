"""sok.Saver on one rank: dense values, and full disks."""

import pathlib
import re

import numpy as np
import pytest
import tensorflow as tf

from sok_like.saving.format import shard_file

pytestmark = pytest.mark.keras


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
