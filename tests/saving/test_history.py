"""Earlier states: what `sok.Saver().list` shows, `restore(until=...)` and `go_back` bring back."""

import datetime
import os
import shutil

import numpy as np
import pytest
import tensorflow as tf

from tests.checks.serving import OneTable
from tests.emulated import on_host
from tests.training import apply_gradient, rows_by_key

pytestmark = on_host


def rows(table):
    return {key: row[0] for key, row in rows_by_key(table).items()}


class Days:
    """A table of which each day is a dump: SGD with rate 1 takes 1 from each key of the day."""

    keys = ([1, 2], [2, 3], [3, 4])
    states = ({1: -1, 2: -1}, {1: -1, 2: -2, 3: -1}, {1: -1, 2: -2, 3: -2, 4: -1})

    def __init__(self, sok, folder):
        self.table = sok.EmbeddingVariable(2, name="days", initializer="zeros")
        self.optimizer = sok.OptimizerWrapper(tf.keras.optimizers.SGD(1.0))
        self.names = []
        for day, keys in enumerate(self.keys):
            apply_gradient(self.optimizer, self.table, keys)
            since = "last" if day else None
            name = sok.Saver().dump(self.table, folder, since=since)
            self.names.append(name.numpy().decode())


def test_a_folder_of_dumps_is_listed(sok, tmp_path):
    days = Days(sok, tmp_path)
    found = sok.Saver().list(tmp_path)
    assert [(each.name, each.kind, each.step, each.table) for each in found] == [
        (name, "delta" if day else "base", day + 1, "days") for day, name in enumerate(days.names)
    ]
    for each in found:
        (file,) = tmp_path.glob(f"*.{each.name}.*")
        assert each.bytes == os.path.getsize(file)
        assert each.time == datetime.datetime.fromtimestamp(os.path.getmtime(file)).astimezone()
    assert "delta" in str(found[1]) and days.names[1] in str(found[1])


@pytest.mark.parametrize("day", range(3))
def test_a_table_goes_back(sok, tmp_path, day):
    days = Days(sok, tmp_path)
    for until in (days.names[day], day + 1, tf.constant(days.names[day]), np.int64(day + 1)):
        days.table.clear()
        sok.Saver().restore(days.table, tmp_path, until=until)
        assert rows(days.table) == days.states[day]
    other = sok.EmbeddingVariable(2, name="days")
    sok.Saver().restore(other, tmp_path, rows_only=True, until=days.names[day])
    assert rows(other) == days.states[day]


def test_after_it_went_back_a_chain_goes_on_from_there(sok, tmp_path):
    days, saver = Days(sok, tmp_path), sok.Saver()
    saver.restore(days.table, tmp_path, until=days.names[0])
    apply_gradient(days.optimizer, days.table, [9])
    for since in ("last", days.names[1]):  # it has left the last one
        with pytest.raises(RuntimeError, match="this table has written by `dump`, or was restored"):
            saver.dump(days.table, tmp_path, since=since)
    name = saver.dump(days.table, tmp_path, since=days.names[0]).numpy().decode()
    assert [each.name for each in saver.list(tmp_path)] == [days.names[0], name]
    again = sok.EmbeddingVariable(2, name="days")
    saver.restore(again, tmp_path)
    assert rows(again) == days.states[0] | {9: -1}


def test_whoever_has_the_later_dumps_cannot_go_on_with_them(sok, tmp_path):
    days, saver, there = Days(sok, tmp_path / "a"), sok.Saver(), tmp_path / "b"
    shutil.copytree(tmp_path / "a", there)
    other = sok.EmbeddingVariable(2, name="days", initializer="zeros")
    saver.restore(other, there, until=days.names[0])
    saver.dump(other, there, since=days.names[0])
    shutil.rmtree(tmp_path / "a")
    there.rename(tmp_path / "a")  # as if another process had gone back
    with pytest.raises(RuntimeError, match="`since` must be a dump of table 'days' in this folder"):
        saver.dump(days.table, tmp_path / "a", since=days.names[2])
    with pytest.raises(RuntimeError, match="this table has written by `dump`, or was restored"):
        saver.dump(days.table, tmp_path / "a", since="last")


def test_what_is_not_there(sok, tmp_path):
    days, saver = Days(sok, tmp_path), sok.Saver()
    before = rows(days.table)
    for until in ("no_such", 4):
        with pytest.raises(RuntimeError, match="`until` must be a dump of table 'days'.*at step 1"):
            saver.restore(days.table, tmp_path, until=until)
    for until in (1.5, True, "", datetime.datetime.now()):
        with pytest.raises(TypeError, match="`until` must be"):
            saver.restore(days.table, tmp_path, until=until)
    assert rows(days.table) == before
    with pytest.raises(FileNotFoundError, match="no_such"):
        saver.list(tmp_path / "no_such")
    assert saver.list(tmp_path.parent) == []
    saver.compact(days.table, tmp_path)
    assert [(each.kind, each.name) for each in saver.list(tmp_path)] == [("base", days.names[2])]
    with pytest.raises(RuntimeError, match="`until` must be"):
        saver.restore(days.table, tmp_path, until=days.names[1])


def fitted(sok, folder, epochs, **options):
    tf.keras.utils.set_random_seed(3)
    inputs = tf.keras.Input([1], dtype="int64")
    layer = sok.GroupEmbedding({"user": 2}, combiners="sum", name="features")
    model = tf.keras.Model(inputs, tf.keras.layers.Dense(1)(layer({"user": inputs})["user"]))
    model.compile(sok.OptimizerWrapper(tf.keras.optimizers.Adam(0.1)), "mse")
    model(np.zeros([1, 1], np.int64))
    keys = np.arange(24).reshape(24, 1)
    callback = sok.callbacks.BackupAndRestore(folder, delete_checkpoint=False, **options)
    running = {"batch_size": 12, "shuffle": False, "verbose": 0, "callbacks": [callback]}
    model.fit(keys, keys / 24, epochs=epochs, **running)
    return model.predict(keys, verbose=0)


@pytest.mark.keras
def test_a_model_goes_back(sok, tmp_path):
    saver, folder = sok.Saver(), tmp_path / "backup"
    of_four = fitted(sok, folder, 4, max_to_keep=3)
    assert [(each.kind, each.name, each.step) for each in saver.list(folder)] == [
        ("backup", f"ckpt-{number}", 2 * number) for number in (2, 3, 4)
    ]
    assert all(each.bytes > 0 for each in saver.list(folder))
    with pytest.raises(ValueError, match=r"one of \['ckpt-2', 'ckpt-3', 'ckpt-4'\]"):
        saver.go_back(folder, "ckpt-1")
    saver.go_back(folder, "ckpt-2")
    assert [each.name for each in saver.list(folder)] == ["ckpt-2"]
    assert not list(folder.glob("ckpt-[34]*"))
    of_three = fitted(sok, folder, 3, max_to_keep=3)  # two epochs were behind it
    assert [each.name for each in saver.list(folder)] == ["ckpt-2", "ckpt-3"]
    np.testing.assert_array_equal(of_three, fitted(sok, tmp_path / "straight", 3))
    assert (of_four != of_three).any()


def test_exports_and_their_deltas_are_listed(sok, tmp_path):
    table = sok.EmbeddingVariable(2, name="served")
    module = OneTable(table)
    sok.assign(table, [1], [[1, 1]])
    sok.export_saved_model(module, tmp_path / "1", refreshable=True)
    for value in (2, 3):
        sok.assign(table, [1], [[value, value]])
        sok.export_delta(module, tmp_path / "1.deltas" / f"00{value}")
    listed = [("export", "1"), ("export delta", "002"), ("export delta", "003")]
    for folder in (tmp_path, tmp_path / "1"):
        assert [(each.kind, each.name) for each in sok.Saver().list(folder)] == listed
