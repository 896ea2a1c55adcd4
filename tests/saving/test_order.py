"""A dump or a restore within a tf.function comes between what stands before it and after it."""

import time

import numpy as np
import tensorflow as tf

from sok_like.saving.format import manifest
from sok_like.table import table_reader
from tests.training import apply_gradient, rows_by_key


def slow(monkeypatch, module, name):
    """A function that gives ops which do not wait for it the time to come first."""
    own = getattr(module, name)

    def function(*arguments, **keywords):
        time.sleep(0.3)
        return own(*arguments, **keywords)

    monkeypatch.setattr(module, name, function)


def write(sok, table, value, keys=(1, 2)):
    sok.assign(table, tf.constant(keys, tf.int64), tf.fill([len(keys), 2], value))


def test_dumps_and_restores_of_one_program_see_each_other(sok, tmp_path, monkeypatch):
    table, saver = sok.EmbeddingVariable(2, name="ordered"), sok.Saver()

    @tf.function
    def program():
        write(sok, table, 1.0)
        write(sok, table, 2.0, keys=(2,))
        saver.dump_to_file(table, tmp_path)
        write(sok, table, 3.0)
        rows = [sok.export(table)[1]]
        saver.restore(table, tmp_path)
        rows.append(sok.export(table)[1])
        write(sok, table, 4.0, keys=(1,))
        return [*rows, sok.export(table)[1]]

    slow(monkeypatch, table_reader, "content")
    slow(monkeypatch, manifest, "write_manifest")
    found = [rows.numpy()[:, 0].tolist() for rows in program()]
    assert found == [[3.0, 3.0], [1.0, 2.0], [4.0, 2.0]]
    saver.restore(table, tmp_path)
    assert rows_by_key(table) == {1: [1.0, 1.0], 2: [2.0, 2.0]}


def test_an_optimizer_s_step_comes_after_the_dump_before_it(sok, tmp_path, monkeypatch):
    table = sok.EmbeddingVariable(2, name="ordered")
    optimizer = sok.OptimizerWrapper(tf.keras.optimizers.SGD(1.0))
    write(sok, table, 1.0)

    apply_gradient(optimizer, table, [1, 2])

    @tf.function
    def program():
        apply_gradient(optimizer, table, [1, 2])
        sok.Saver().dump_to_file(table, tmp_path)
        apply_gradient(optimizer, table, [1, 2])

    slow(monkeypatch, table_reader, "content")
    program()
    assert rows_by_key(table) == {1: [-2.0, -2.0], 2: [-2.0, -2.0]}
    sok.Saver().restore_from_file(table, tmp_path)
    assert rows_by_key(table) == {1: [-1.0, -1.0], 2: [-1.0, -1.0]}
    assert int(np.asarray(table.snapshot().optimizer_step)) == 2
