"""What a restore may not do: lose rows when it fails, invent slot rows, forget the step."""

import copy

import numpy as np
import pytest
import tensorflow as tf

from sok_like.saving.format import durable
from tests.checks.files import check_same
from tests.emulated import on_host
from tests.training import apply_gradient, content


def step(table, optimizer, keys=(1, 2), value=1.0):
    apply_gradient(optimizer, table, keys, value)


def make_optimizer(sok, rule):
    keras = tf.keras.optimizers
    return sok.OptimizerWrapper(
        {
            "momentum": lambda: keras.SGD(0.1, momentum=0.9),
            "adagrad": lambda: keras.Adagrad(0.1, initial_accumulator_value=0.3),
            "adam": lambda: keras.Adam(0.1),
        }[rule]()
    )


def copied(sok, way, folder, source, target):
    """Content of `source` into `target`, by each door."""
    if way == "dump":
        sok.Saver().dump_to_file(source, folder)
        sok.Saver().restore_from_file(target, folder)
    elif way == "checkpoint":
        path = tf.train.Checkpoint(table=source).save(str(folder / "checkpoint"))
        tf.train.Checkpoint(table=target).restore(path).assert_consumed()
    else:
        target.load_snapshot(copy.deepcopy(source).snapshot())
    return target


WAYS = ["dump", "checkpoint", "copy"]


@pytest.mark.parametrize("way", WAYS)
def test_keys_are_found_after_a_restore(sok, tmp_path, way):
    keys = np.random.default_rng(3).permutation(4000)[:3000]
    rows = np.arange(6000, dtype=np.float32).reshape(3000, 2)
    source = sok.EmbeddingVariable(2, name="users")
    sok.assign(source, keys, rows)
    # Into few buckets or none: those of the content must be probed as they were filled.
    for held in (range(10_000, 10_200), []):
        target = sok.EmbeddingVariable(2, name="users")
        if held:
            sok.assign(target, list(held), np.zeros([len(held), 2], np.float32))
        found_rows, found = copied(sok, way, tmp_path, source, target).find(keys)
        assert found.numpy().all()
        np.testing.assert_array_equal(found_rows, rows)
        tf.nn.embedding_lookup(target, tf.constant(keys))
        assert int(target.size()) == 3000


@pytest.mark.keras
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("rule", ["momentum", "adagrad", "adam"])
def test_keys_that_came_without_an_optimizer_are_no_nan_later(sok, tmp_path, rule, way):
    def table():
        return sok.EmbeddingVariable(2, name="users", initializer="zeros")

    trained = table()
    step(trained, make_optimizer(sok, rule))
    without = copied(sok, way, tmp_path / "a", trained, table())
    sok.assign(without, [7], tf.ones([1, 2]))  # its slot rows are not known
    assert np.isnan(content(without)["slot_rows"][2]).all()

    attached, optimizer, oracle = table(), make_optimizer(sok, rule), table()
    step(attached, optimizer, keys=[3])
    copied(sok, way, tmp_path / "b", without, attached)
    initial = 0.3 if rule == "adagrad" else 0.0
    assert (content(attached)["slot_rows"][2] == initial).all()
    # The key starts like one that the optimizer has seen from the beginning, untouched so far.
    step(attached, optimizer, keys=[7])
    sok.assign(oracle, [7], tf.ones([1, 2]))
    fresh = make_optimizer(sok, rule)
    step(oracle, fresh, keys=[1])
    step(oracle, fresh, keys=[7])
    np.testing.assert_allclose(attached.find([7])[0], oracle.find([7])[0], atol=1e-5)


@pytest.mark.keras
@pytest.mark.parametrize("way", [*WAYS, "delta", "layer"])
@pytest.mark.parametrize("rule", ["SGD", "AdamW"])
def test_the_row_of_a_key_that_comes_later_has_decayed(sok, tmp_path, rule, way):
    def make():
        layer = sok.All2AllDenseEmbedding(
            None, 2, 1, 1, dynamic_input=True, embedding_initializer="ones", name="users"
        )
        optimizer = getattr(tf.keras.optimizers, rule)(0.1, weight_decay=0.5)
        return layer, layer.embedding_variable, sok.OptimizerWrapper(optimizer)

    (layer, source, optimizer), (other, target, again) = make(), make()
    for _ in range(3):
        step(source, optimizer)
    step(target, again)  # what has been trained before a restore is gone
    if way == "delta":
        first = sok.Saver().dump(source, tmp_path)
        step(source, optimizer)
        sok.Saver().dump(source, tmp_path, since=first)
        sok.Saver().restore_from_file(target, tmp_path)
    elif way == "layer":
        store = {}
        layer.save_own_variables(store)
        other.load_own_variables(store)
    else:
        copied(sok, way, tmp_path, source, target)
    done = 4 if way == "delta" else 3
    np.testing.assert_allclose(target.find([9])[0], np.full([1, 2], 0.95**done), rtol=1e-6)
    step(target, again)
    row = np.full([1, 2], 0.95 ** (done + 1))
    np.testing.assert_allclose(target.find([9])[0], row, rtol=1e-6)
    np.testing.assert_allclose(tf.nn.embedding_lookup(target, np.array([9])), row, rtol=1e-6)


@pytest.mark.keras
def test_two_tables_of_one_optimizer_keep_their_own_steps(sok, tmp_path):
    """One is restored and one is new; and the restored one may go back in time."""
    tables = [sok.EmbeddingVariable(1, name=f"t{i}", initializer="zeros") for i in range(2)]
    optimizer = make_optimizer(sok, "adam")
    step(tables[0], optimizer, keys=[1])
    sok.Saver().dump_to_file(tables[0], tmp_path)
    for _ in range(5):
        step(tables[0], optimizer, keys=[1], value=3.0)
    sok.Saver().restore_from_file(tables[0], tmp_path)
    new = make_optimizer(sok, "adam")
    stock = [tf.keras.optimizers.Adam(0.1) for _ in range(2)]
    dense = [tf.Variable([0.0]) for _ in range(2)]
    stock[0].apply_gradients([(tf.constant([1.0]), dense[0])])
    for value in (1.0, -2.0, 0.5):
        gradient = tf.IndexedSlices(tf.constant([[value]]), tf.constant([1], tf.int64))
        new.apply_gradients([(gradient, table) for table in tables])
        for one, table, variable in zip(stock, tables, dense, strict=True):
            one.apply_gradients([(tf.constant([value]), variable)])
            np.testing.assert_allclose(table.find([1])[0], [variable], atol=1e-5)


@pytest.mark.parametrize("when", ["dump_to_file", "restore_from_file"])
def test_rows_only(sok, tmp_path, when):
    table, again = (sok.EmbeddingVariable(1, name="users", initializer="zeros") for _ in range(2))
    optimizer = make_optimizer(sok, "adam")
    for _ in range(4):
        step(table, optimizer, keys=[1])
    before = table.find([1])[0].numpy()
    saver = sok.Saver()
    saver.dump_to_file(table, tmp_path, rows_only=when == "dump_to_file")
    saver.restore_from_file(again, tmp_path, rows_only=when == "restore_from_file")
    np.testing.assert_array_equal(again.find([1])[0], before)
    step(again, make_optimizer(sok, "adam"), keys=[1], value=5.0)
    # Adam's first step is the learning rate, whatever the gradient.
    np.testing.assert_allclose(again.find([1])[0], before - 0.1, atol=1e-5)


@on_host
@pytest.mark.parametrize("problem", ["key out of range", "too many keys", "wrong sizes"])
def test_a_restore_that_fails_changes_nothing(sok, tmp_path, problem):
    hashed = problem != "key out of range"
    dumped = sok.EmbeddingVariable(2, name="users")
    optimizer = make_optimizer(sok, "adam")
    step(dumped, optimizer, keys=range(20) if problem == "too many keys" else [0, 3, 15])
    sok.Saver().dump_to_file(dumped, tmp_path)
    table = sok.EmbeddingVariable(2, name="users", capacity=10, use_hashtable=hashed)
    step(table, optimizer, keys=[1, 2])
    before, snapshot = content(table), dumped.snapshot()
    if problem == "wrong sizes":
        snapshot.slot_widths = tf.constant([2**40, 2], tf.int64)
        with pytest.raises(tf.errors.OpError):
            table.load_snapshot(snapshot)
    else:
        kind = tf.errors.ResourceExhaustedError if hashed else RuntimeError
        with pytest.raises(kind, match="rank 0: .*'users'"):
            sok.Saver().restore_from_file(table, tmp_path)
        with pytest.raises(tf.errors.OpError, match="'users'"):
            table.load_snapshot(snapshot)
    check_same(content(table), before)
    step(table, optimizer, keys=[1, 3])  # and goes on


def test_two_tables_of_one_name_do_not_share_a_folder(sok, tmp_path):
    saver = sok.Saver()
    first, second = (sok.EmbeddingVariable(2, name="users") for _ in range(2))
    sok.assign(first, [1], tf.ones([1, 2]))
    saver.dump_to_file(first, tmp_path)
    with pytest.raises(RuntimeError, match="different names. Received: two tables 'users'"):
        saver.dump_to_file(second, f"{tmp_path}/./")
    saver.dump_to_file(first, tmp_path)
    saver.restore_from_file(second, tmp_path)  # now it is the same table, gone on
    saver.dump_to_file(second, tmp_path)
    del first, second
    saver.dump_to_file(sok.EmbeddingVariable(2, name="users"), tmp_path)  # nobody could miss it


def test_memory_that_runs_out_is_not_called_damage(sok, tmp_path, monkeypatch):
    table = sok.EmbeddingVariable(2, name="large")
    sok.assign(table, [1, 2], tf.ones([2, 2]))
    sok.Saver().dump_to_file(table, tmp_path)
    own = durable.read_into

    def fail(path, at, buffer):
        if str(path).endswith(".npz"):
            raise MemoryError
        return own(path, at, buffer)

    monkeypatch.setattr(durable, "read_into", fail)
    with pytest.raises(tf.errors.ResourceExhaustedError, match=r"out of memory while .*\.npz") as e:
        sok.Saver().restore_from_file(table, tmp_path)
    assert "whole shard file" not in str(e.value)
    assert int(table.size()) == 2
