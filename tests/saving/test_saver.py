"""sok.Saver: a dump of N ranks is restored on M ranks, with the optimizer's state."""

import json
import pathlib
import re

import numpy as np
import pytest
import tensorflow as tf

import sok_like as sok
from sok_like.runtime.ranks import comm
from sok_like.saving.format import shard_file

pytestmark = pytest.mark.keras

DIM = 4


def train(layer, optimizer, steps):
    """The same `steps` on any number of ranks: the batch is split, its gradients are summed."""
    rank, world_size = comm.current().rank, comm.current().world_size
    for step in steps:
        keys = np.random.default_rng(step).integers(-60, 60, 24)[rank::world_size]
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(layer(tf.constant(keys)) ** 2)
        gradients = tape.gradient(loss, layer.trainable_variables)
        optimizer.apply_gradients(zip(gradients, layer.trainable_variables, strict=True))


def make():
    layer = sok.All2AllDenseEmbedding(None, DIM, 1, 1, dynamic_input=True, name="items")
    # With weight decay, rows of keys that come after the restore tell whether it was forgotten.
    return layer, sok.OptimizerWrapper(tf.keras.optimizers.AdamW(0.05, weight_decay=0.5))


def rows_of(layer):
    keys, rows = sok.export(layer.embedding_variable)
    return dict(zip(keys.numpy().tolist(), rows.numpy(), strict=True))


def train_and_dump(folder):
    layer, optimizer = make()
    train(layer, optimizer, range(6))
    dumped = sok.Saver().dump_to_file(layer.embedding_variable, folder)
    at_dump = rows_of(layer)
    train(layer, optimizer, range(6, 12))
    return {
        "status": dumped.numpy(),
        "manifest": json.loads((folder / "items.json").read_text()),
        "at_dump": at_dump,
        "later": rows_of(layer),
    }


def restore_and_train(folder):
    layer, optimizer = make()
    train(layer, optimizer, range(100, 106))  # what restoring replaces; also brings step to 6
    sok.Saver().restore_from_file(layer.embedding_variable, folder)
    restored = rows_of(layer)
    train(layer, optimizer, range(6, 12))
    return {"restored": restored, "later": rows_of(layer)}


def joined(results, name):
    rows = {}
    for result in results:
        rows.update(result[name])
    return rows


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


@pytest.mark.parametrize("writers, readers", [(2, 1), (2, 2), (1, 3)])
def test_restored_at_another_world_size_training_goes_on_alike(
    on_threads, tmp_path, writers, readers
):
    dumped = on_threads(writers, train_and_dump, tmp_path)
    for result in dumped:
        manifest = result["manifest"]
        assert result["status"] == b"OK"
        shards = len(manifest["shards"])
        assert (manifest["table"], manifest["dim"], shards) == ("items", DIM, writers)
    check_restored(dumped, on_threads(readers, restore_and_train, tmp_path))


@pytest.mark.ranks
def test_processes_restore_what_processes_dumped(on_processes, tmp_path):
    dumped = on_processes(2, train_and_dump, tmp_path)
    check_restored(dumped, on_processes(2, restore_and_train, tmp_path))


def test_a_failure_on_one_rank_is_raised_on_all_and_changes_nothing(on_threads, tmp_path):
    def check():
        layer, optimizer = make()
        train(layer, optimizer, range(2))
        before, saver = rows_of(layer), sok.Saver()
        saver.dump_to_file(layer.embedding_variable, tmp_path)
        mine = tmp_path / "missing" if comm.current().rank else tmp_path
        with pytest.raises(RuntimeError, match="rank 1: FileNotFoundError"):
            saver.restore_from_file(layer.embedding_variable, mine)
        with pytest.raises(RuntimeError, match="rank 0: "):
            saver.dump_to_file(layer.embedding_variable, "/proc/no/such/folder")
        after = rows_of(layer)
        assert after.keys() == before.keys()
        assert all(np.array_equal(before[key], row) for key, row in after.items())

    on_threads(2, check)


def test_dense_values_and_a_v1_session(sok, tmp_path):
    layer, _ = make()
    blocks = [np.arange(8, dtype=np.float32).reshape(2, 4), np.ones([3, 4], np.float32)]
    status = sok.Saver().load_embedding_values(layer.embedding_variable, blocks)
    assert status.numpy() == b"OK"
    loaded = rows_of(layer)
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
