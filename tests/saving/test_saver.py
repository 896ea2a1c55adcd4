"""sok.Saver: a dump of N ranks is restored on M ranks, with the optimizer's state."""

import pathlib
import re

import numpy as np
import pytest
import tensorflow as tf

from sok_like.saving.format import shard_file
from tests.checks import saver
from tests.checks.saver import DIM
from tests.ranks import run_ranks

pytestmark = pytest.mark.keras


def joined(results, name):
    rows = {}
    for result in results:
        rows.update(result[name])
    return rows


@pytest.mark.ranks
def test_dump_says_ok_and_names_its_files(rank_results):
    for result in rank_results(2, "saver.restored"):
        dumped = result["dumped"]
        manifest = dumped["manifest"]
        assert dumped["status"] == b"OK"
        assert (manifest["table"], manifest["dim"], len(manifest["shards"])) == ("items", DIM, 2)


def check_restored(results, again):
    expected = joined(results, "at_dump")
    restored = joined(again, "restored")
    assert restored.keys() == expected.keys()
    for key, row in expected.items():
        np.testing.assert_array_equal(restored[key], row)
    # Without momentum and velocity in the dump, the next steps would differ by far more.
    expected, later = joined(results, "later"), joined(again, "later")
    assert later.keys() == expected.keys()
    for key, row in expected.items():
        np.testing.assert_allclose(later[key], row, atol=1e-5)
    for rank, result in enumerate(again):
        assert all(key % 2**64 % len(again) == rank for key in result["restored"])


@pytest.mark.ranks
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_restored_at_another_world_size_training_goes_on_alike(rank_results, world_size):
    (launch,) = [n for n, readers in saver.READERS.items() if world_size in readers]
    ranks = rank_results(launch, "saver.restored")
    dumped = [rank["dumped"] for rank in ranks[: saver.WRITERS[launch]]]
    check_restored(dumped, [rank[world_size] for rank in ranks[:world_size]])


@pytest.fixture(scope="module")
def dumped(tmp_path_factory):
    folder = tmp_path_factory.mktemp("dump")
    return folder, in_processes("train_and_dump", 2, folder)


def in_processes(what, num_ranks, folder):
    args = {"what": what, "folder": str(folder)}
    return run_ranks("tests.checks.saver:in_a_process", num_ranks, args=args)


@pytest.mark.slow
@pytest.mark.ranks
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_restored_by_other_processes_training_goes_on_alike(dumped, world_size):
    folder, results = dumped
    check_restored(results, in_processes("restore_and_train", world_size, folder))


@pytest.mark.ranks
def test_a_failure_on_one_rank_is_raised_on_all_and_changes_nothing(rank_results):
    for result in rank_results(2, "saver.failure"):
        assert "rank 1: FileNotFoundError" in result["messages"]["restore_from_file"]
        assert "rank 0: " in result["messages"]["dump_to_file"]
        assert result["same"]


def test_dense_values_and_a_v1_session(sok, tmp_path):
    layer, _ = saver.make()
    blocks = [np.arange(8, dtype=np.float32).reshape(2, 4), np.ones([3, 4], np.float32)]
    status = sok.Saver().load_embedding_values(layer.embedding_variable, blocks)
    assert status.numpy() == b"OK"
    loaded = saver.rows_of(layer)
    assert sorted(loaded) == [0, 1, 2, 3, 4]
    np.testing.assert_array_equal(loaded[1], [4, 5, 6, 7])
    np.testing.assert_array_equal(loaded[4], np.ones(4))
    graph = tf.Graph()
    with graph.as_default():
        init = sok.Init(global_batch_size=12, seed=7)
        variable = sok.EmbeddingVariable(DIM, name="graph_items")
        assign = sok.assign(variable, tf.constant([7, -9], tf.int64), tf.fill([2, DIM], 2.5))
        dump = sok.Saver().dump_to_file(variable, tmp_path)
        restore = sok.Saver().restore_from_file(variable, tmp_path)
        clear, size = variable.clear(), variable.size()
        find, _ = variable.find(tf.constant([7, -9], tf.int64))
    with tf.compat.v1.Session(graph=graph) as session:
        session.run(init)
        session.run(variable.initializer)
        session.run(assign)
        statuses = [session.run(dump)]
        session.run(clear)
        emptied = session.run(size)
        statuses.append(session.run(restore))
        found = session.run(find)
    assert statuses == [b"OK", b"OK"] and emptied == 0
    np.testing.assert_array_equal(found, np.full([2, DIM], 2.5))


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
