"""`sok.Saver` on one rank: full disks, and schemes without a file system."""

import pathlib
import re

import pytest
import tensorflow as tf

from sok_like.saving.format import shard_file

pytestmark = pytest.mark.keras


@pytest.mark.parametrize("path", ["s3://bucket/model", "hdfs://host/model", "nowhere://x"])
def test_a_scheme_without_a_file_system_raises_and_leaves_no_folder(
    sok, path, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    table, saver = sok.EmbeddingVariable(4, name="elsewhere"), sok.Saver()
    calls = [saver.dump, saver.dump_to_file, saver.restore, saver.restore_from_file, saver.compact]
    words = f"no file system is registered for '{path.partition('://')[0]}'"
    for call in [*calls, lambda *given: saver.dump(*given, since="last")]:
        with pytest.raises(RuntimeError, match=words):
            call(table, path)
    assert list(tmp_path.iterdir()) == []


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
