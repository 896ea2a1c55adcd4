"""Variables of sok2 among TensorFlow's own tools, on ranks, against NumPy."""

import contextlib

import numpy as np
import pytest
import tensorflow as tf

import sok_like as sok
from sok_like import sok2

ROWS, DIM, RATE = 8, 3, 0.5
KEYS = [0, 1, 6]
KERNEL = np.array([1.0, 2.0, 3.0], np.float32)
START = np.arange(ROWS * DIM, dtype=np.float32).reshape(ROWS, DIM) / 10
MODES = ("distributed", "localized")
v1 = tf.compat.v1


def make(mode, name):
    home = f"localized:{sok.size() - 1}" if mode == "localized" else None
    return sok2.Variable(START, mode=home, name=name)


@pytest.mark.parametrize("mode", MODES)
def test_a_session_trains(on_threads, mode):
    """Two steps of gradient descent; each rank has the same batch, and its share of the loss."""
    of_table = np.zeros([ROWS, DIM])
    of_table[KEYS] = KERNEL

    def check():
        with tf.Graph().as_default(), v1.Session() as running:
            table = make(mode, "session")
            rows = sok2.all2all_dense_embedding(table, tf.constant(KEYS, tf.int64))
            loss = tf.reduce_sum(rows * KERNEL) / sok.size()
            optimizer = sok2.OptimizerWrapper(v1.train.GradientDescentOptimizer(RATE))
            train = optimizer.apply_gradients([(tf.gradients(loss, [table])[0], table)])
            running.run(v1.global_variables_initializer())
            running.run(train)
            running.run(train)
            expected = (START - 2 * RATE * of_table)[table._rows_here()]
            np.testing.assert_allclose(running.run(table), expected, rtol=1e-5)

    on_threads(2, check)


@pytest.mark.parametrize("world_size", [1, 3])
def test_a_v1_saver_writes_all_rows_or_raises(on_threads, world_size, tmp_path):
    """On one rank, or in a folder of each; all ranks raise where they share a path."""

    def check():
        with tf.Graph().as_default(), v1.Session() as running:
            table = make("distributed", "saved")
            empty, saver = table.assign(tf.zeros_like(table)), v1.train.Saver()
            running.run(v1.global_variables_initializer())
            words = f"(?s)(?=.*'saved:0').*{world_size} ranks"
            refused = pytest.raises(NotImplementedError, match=words)
            with refused if world_size > 1 else contextlib.nullcontext():
                saver.save(running, str(tmp_path / "all"))
            own = tmp_path / str(sok.rank())
            own.mkdir()
            path = saver.save(running, str(own / "model"))
            running.run(empty)
            saver.restore(running, path)
            np.testing.assert_array_equal(running.run(table), START[table._rows_here()])

    on_threads(world_size, check)


def checkpoint(folder):
    for mode in MODES:
        table = make(mode, f"kept_{mode}")
        path = tf.train.Checkpoint(table=table).save(f"{folder}/{mode}")
        table.assign(tf.zeros_like(table))
        tf.train.Checkpoint(table=table).restore(path).expect_partial()
        np.testing.assert_array_equal(table.numpy(), START[table._rows_here()])


@pytest.mark.ranks
def test_a_checkpoint_keeps_the_rows_of_all_ranks(on_processes, tmp_path):
    on_processes(2, checkpoint, tmp_path)
