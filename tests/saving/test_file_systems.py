"""`sok.Saver` on file systems that TensorFlow writes."""

import numpy as np
import pytest
import tensorflow as tf

from sok_like.saving.format import durable

pytestmark = pytest.mark.keras


@pytest.fixture
def table(sok):
    """A table with keys that no single part of a file holds, and what it has after two calls."""
    table = sok.EmbeddingVariable(4, name="elsewhere")
    rows = np.random.default_rng(0).standard_normal((3000, 4)).astype(np.float32)
    sok.assign(table, np.arange(3000) * 7 - 3, rows)
    return table


def content(sok, table):
    keys, rows = sok.export(table)
    return dict(zip(keys.numpy().tolist(), rows.numpy().tolist(), strict=True))


def test_a_chain_in_memory_is_restored_compacted_and_verified(sok, table, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    saver, folder = sok.Saver(), f"ram://{tmp_path.name}/model"
    saver.dump(table, folder)
    sok.assign(table, [4, 5], tf.zeros([2, 4]))
    table.erase([-3])
    saver.dump(table, folder, since="last")
    assert len(tf.io.gfile.listdir(folder)) == 3
    expected = content(sok, table)
    for call in (saver.restore, saver.compact, saver.restore):
        if call == saver.restore:
            table.clear()
        call(table, folder)
        assert content(sok, table) == expected
    left = tf.io.gfile.listdir(folder)
    assert len(left) == 2  # the two that it has replaced are gone
    (name,) = (name for name in left if name.endswith(".npz"))
    data = bytearray(durable.read(f"{folder}/{name}"))
    data[-9000] ^= 1
    durable.write(f"{folder}/{name}", bytes(data))
    with pytest.raises(RuntimeError, match=rf"{folder}/{name} must be a whole.*checksum"):
        saver.restore(table, folder)
    assert content(sok, table) == expected
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
