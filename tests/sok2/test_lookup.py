"""`sparse_read_and_evict` against a model of what a bounded table holds."""

import datetime

import numpy as np
import pytest
import tensorflow as tf

from sok_like import sok2


@pytest.fixture(autouse=True)
def _one_rank(sok):
    sok2.init(use_legacy_optimizer=False)


@pytest.mark.parametrize("as_function", [False, True])
def test_evicted_rows_are_handed_back(as_function):
    table = sok2.DynamicVariable(2, "11", "hybrid", max_capacity=8)
    optimizer = sok2.OptimizerWrapper(tf.keras.optimizers.SGD(1.0))

    def step(keys):
        with tf.GradientTape() as tape:
            rows, *evicted = sok2.sparse_read_and_evict(table, keys)
            loss = tf.reduce_sum(rows)
        optimizer.apply_gradients([(tape.gradient(loss, table), table)])
        return rows, *evicted

    step = tf.function(step) if as_function else step
    held: dict[int, float] = {}
    rng = np.random.default_rng(4)
    for _ in range(12):
        keys = rng.choice(30, 5, replace=False)
        expected = [held.get(key, 11.0) for key in keys]
        rows, gone, gone_rows = step(tf.constant(keys))
        assert rows.numpy()[:, 0].tolist() == expected
        seen = {key: held.pop(key, 11.0) for key in keys.tolist()}  # the last to leave
        leaving = len(held) + len(seen) - 8
        assert len(gone) == max(leaving, 0)
        for key, row in zip(gone.numpy().tolist(), gone_rows.numpy(), strict=True):
            assert row.tolist() == [held[key]] * 2
            del held[key]
        held |= {key: row - 1 for key, row in seen.items()}
        found = sok2.export(table)
        assert set(found[0].numpy().tolist()) == set(held)


def test_only_hybrid_tables_evict():
    for variable in (sok2.DynamicVariable(2, "1", "hbm"), sok2.Variable([[1.0]])):
        with pytest.raises(TypeError, match="'hybrid'"):
            sok2.sparse_read_and_evict(variable, [1])


def test_rows_that_cannot_be_handed_back_are_an_error(monkeypatch):
    monkeypatch.setattr("sok_like.sok2.dynamic_variable._MOST_KEPT", 2)
    table = sok2.DynamicVariable(2, "1", "hybrid", max_capacity=4)
    sok2.sparse_read_and_evict(table, [1, 2, 3, 4])
    assert len(sok2.sparse_read_and_evict(table, [5, 6])[1]) == 2
    with pytest.raises(tf.errors.InvalidArgumentError, match="fewer keys at a time"):
        sok2.sparse_read_and_evict(table, [7, 8, 9])


def test_a_dump_of_more_keys_than_fit(tmp_path):
    big = sok2.DynamicVariable(2, "1", "hybrid", max_capacity=8, name="ids")
    sok2.assign(big, [1, 2, 3, 4, 5, 6], tf.ones([6, 2]))
    sok2.dump(str(tmp_path), big)
    small = sok2.DynamicVariable(2, "1", "hybrid", max_capacity=4, name="ids")
    small.sparse_read([7, 8])
    with pytest.warns(UserWarning, match="'ids' holds at most 4 keys on rank 0, and was given 2"):
        sok2.load(str(tmp_path), small)
    assert sok2.export(small)[0].numpy().tolist() == [3, 4, 5, 6]


def test_a_dump_leaves_no_slots_of_an_earlier_one_beside_other_keys(tmp_path):
    table = sok2.DynamicVariable(2, "1", name="ids")
    optimizer = sok2.OptimizerWrapper(tf.keras.optimizers.Adam(0.1))
    sok2.assign(table, [1, 2], tf.ones([2, 2]))
    gradient = tf.IndexedSlices(tf.ones([2, 2]), tf.constant([1, 2], tf.int64))
    optimizer.apply_gradients([(gradient, table)])
    for others in ("ids-Adam-m", "ids_0-Adam-notes"):
        (tmp_path / others).write_text("of somebody else")
    sok2.dump(str(tmp_path), table, optimizer)
    assert (tmp_path / "ids_0-Adam-m").exists()

    again = sok2.DynamicVariable(2, "1", name="ids")
    sok2.assign(again, [3, 4], tf.ones([2, 2]))
    sok2.dump(str(tmp_path), again)
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == ["ids-Adam-m", "ids_0-Adam-notes", "ids_0-key", "ids_0-weight"]
    with pytest.raises(FileNotFoundError, match="ids_0-Adam-m"):
        sok2.load(str(tmp_path), again, sok2.OptimizerWrapper(tf.keras.optimizers.Adam(0.1)))


def test_incremental_model_dump_names_what_does_the_same():
    table = sok2.DynamicVariable(2, "1", "hybrid", max_capacity=4)
    with pytest.raises(NotImplementedError, match="versions"):
        sok2.incremental_model_dump(table, datetime.datetime.now(datetime.timezone.utc))
    table.sparse_read([1, 2])
    table.sparse_read([2, 3])
    rows = table.export()
    assert tf.boolean_mask(rows.keys, rows.versions >= 1).numpy().tolist() == [2, 3]
