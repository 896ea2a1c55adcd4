"""sok.Saver: a dump of N ranks is restored on M ranks, with the optimizer's state."""

import json

import numpy as np
import pytest

from tests.ranks import run_ranks

pytestmark = [pytest.mark.ranks, pytest.mark.keras]

DIM = 4


def train(layer, optimizer, steps):
    """The same `steps` on any number of ranks: the batch is split, its gradients are summed."""
    import tensorflow as tf

    from sok_like.runtime import comm

    rank, world_size = comm.current().rank, comm.current().world_size
    for step in steps:
        keys = np.random.default_rng(step).integers(-60, 60, 24)[rank::world_size]
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(layer(tf.constant(keys)) ** 2)
        gradients = tape.gradient(loss, layer.trainable_variables)
        optimizer.apply_gradients(zip(gradients, layer.trainable_variables, strict=True))


def make():
    import tensorflow as tf

    import sok_like as sok

    sok.Init(global_batch_size=24, seed=11)
    layer = sok.All2AllDenseEmbedding(None, DIM, 1, 1, dynamic_input=True, name="items")
    return layer, sok.OptimizerWrapper(tf.keras.optimizers.Adam(0.05))


def rows_of(layer):
    import sok_like as sok

    keys, rows = sok.export(layer.embedding_variable)
    return dict(zip(keys.numpy().tolist(), rows.numpy(), strict=True))


def train_and_dump(folder):
    import sok_like as sok

    layer, optimizer = make()
    train(layer, optimizer, range(6))
    status = sok.Saver().dump_to_file(layer.embedding_variable, folder)
    at_dump = rows_of(layer)
    train(layer, optimizer, range(6, 12))
    return {"status": status.numpy(), "at_dump": at_dump, "later": rows_of(layer)}


def restore_and_train(folder):
    import sok_like as sok

    layer, optimizer = make()
    train(layer, optimizer, range(100, 106))  # what restoring replaces; also brings step to 6
    sok.Saver().restore_from_file(layer.embedding_variable, folder)
    restored = rows_of(layer)
    train(layer, optimizer, range(6, 12))
    return {"restored": restored, "later": rows_of(layer)}


def fail_on_one_rank(folder):
    import sok_like as sok
    from sok_like.runtime import comm

    layer, optimizer = make()
    train(layer, optimizer, range(2))
    before = rows_of(layer)
    mine = folder if comm.current().rank == 0 else folder + "/missing"
    messages = {}
    for name in ("restore_from_file", "dump_to_file"):
        path = mine if name == "restore_from_file" else "/proc/no/such/folder"
        try:
            getattr(sok.Saver(), name)(layer.embedding_variable, path)
        except Exception as error:
            messages[name] = str(error)
    same = all(np.array_equal(before[k], row) for k, row in rows_of(layer).items())
    return {"messages": messages, "same": same and len(before) == len(rows_of(layer))}


def joined(results, name):
    rows = {}
    for result in results:
        rows.update(result[name])
    return rows


@pytest.fixture(scope="module")
def dumped(tmp_path_factory):
    folder = tmp_path_factory.mktemp("dump")
    return folder, run_ranks(
        "tests.table.test_saver:train_and_dump", 2, args={"folder": str(folder)}
    )


def test_dump_says_ok_and_names_its_files(dumped):
    folder, results = dumped
    assert [r["status"] for r in results] == [b"OK", b"OK"]
    manifest = json.loads((folder / "items.json").read_text())
    assert (manifest["table"], manifest["dim"], len(manifest["shards"])) == ("items", DIM, 2)


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_restored_at_another_world_size_training_goes_on_alike(dumped, world_size):
    folder, results = dumped
    again = run_ranks(
        "tests.table.test_saver:restore_and_train", world_size, args={"folder": str(folder)}
    )
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
        assert all(key % 2**64 % world_size == rank for key in result["restored"])


def test_a_failure_on_one_rank_is_raised_on_all_and_changes_nothing(dumped):
    folder, _ = dumped
    results = run_ranks("tests.table.test_saver:fail_on_one_rank", 2, args={"folder": str(folder)})
    for result in results:
        assert "rank 1: FileNotFoundError" in result["messages"]["restore_from_file"]
        assert "rank 0: " in result["messages"]["dump_to_file"]
        assert result["same"]


def values_and_session(folder):
    import tensorflow as tf

    import sok_like as sok

    layer, _ = make()
    blocks = [np.arange(8, dtype=np.float32).reshape(2, 4), np.ones([3, 4], np.float32)]
    status = sok.Saver().load_embedding_values(layer.embedding_variable, blocks)
    assert status.numpy() == b"OK"
    loaded = rows_of(layer)
    graph = tf.Graph()
    with graph.as_default():
        init = sok.Init(global_batch_size=24, seed=11)
        variable = sok.EmbeddingVariable(DIM, name="graph_items")
        assign = sok.assign(variable, tf.constant([7, -9], tf.int64), tf.fill([2, DIM], 2.5))
        dump = sok.Saver().dump_to_file(variable, folder)
        restore = sok.Saver().restore_from_file(variable, folder)
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
    return {"loaded": loaded, "statuses": statuses, "emptied": emptied, "found": found}


def test_dense_values_and_a_v1_session(tmp_path):
    (result,) = run_ranks(
        "tests.table.test_saver:values_and_session", 1, args={"folder": str(tmp_path)}
    )
    assert sorted(result["loaded"]) == [0, 1, 2, 3, 4]
    np.testing.assert_array_equal(result["loaded"][1], [4, 5, 6, 7])
    np.testing.assert_array_equal(result["loaded"][4], np.ones(4))
    assert result["statuses"] == [b"OK", b"OK"] and result["emptied"] == 0
    np.testing.assert_array_equal(result["found"], np.full([2, DIM], 2.5))
