"""Variables of sok2 among TensorFlow's own tools, on ranks, against NumPy."""

import functools
import tempfile

import numpy as np
import pytest
import tensorflow as tf

import sok_like as sok
from sok_like import sok2
from sok_like.runtime.ranks import comm

ROWS, DIM, RATE, LIMIT = 8, 3, 0.5, 1.0
KEYS = [0, 1, 6]
KERNEL = np.array([1.0, 2.0, 3.0], np.float32)
START = np.arange(ROWS * DIM, dtype=np.float32).reshape(ROWS, DIM) / 10


def modes(world_size):
    return {"distributed": None, "localized": f"localized:{world_size - 1}"}


def here(variable, rows):
    return variable._rows_here(), rows


def clipped():
    """By mode: the norm, and parts of gradients that were clipped together and one by one."""
    found = {}
    for mode, given in modes(sok.size()).items():
        table, kernel = (
            sok2.Variable(START, mode=given, name=f"clipped_{mode}"),
            tf.Variable(KERNEL),
        )

        def of_tape(table=table, kernel=kernel):
            with tf.GradientTape() as tape:
                first = sok2.all2all_dense_embedding(table, KEYS[:2])
                second = sok2.all2all_dense_embedding(table, KEYS[2:])
                rows = tf.concat([first, second], 0)
                loss = tf.reduce_sum(rows * kernel) / sok.size()
            return tape.gradient(loss, [table, kernel])

        def gradients(of_tape=of_tape):
            of_table, of_kernel = of_tape()
            (one, _), norm = tf.clip_by_global_norm([of_table, of_kernel], LIMIT)
            alone = tf.clip_by_norm(of_table, LIMIT)
            return norm, tf.convert_to_tensor(one), tf.convert_to_tensor(alone)

        outside = functools.partial(gradients, tf.function(of_tape))
        ways = {"eager": gradients, "function": tf.function(gradients), "outside": outside}
        for how, function in ways.items():
            norm, together, alone = function()
            found[f"{mode} {how}"] = (
                float(norm),
                here(table, together.numpy()),
                here(table, alone.numpy()),
            )
    return found


def session():
    """By mode: this rank's rows after two steps of gradient descent in a v1 session."""
    v1, found = tf.compat.v1, {}
    for mode, given in modes(sok.size()).items():
        with tf.Graph().as_default():
            table = sok2.Variable(START, mode=given, name=f"session_{mode}")
            rows = sok2.all2all_dense_embedding(table, tf.constant(KEYS, tf.int64))
            loss = tf.reduce_sum(rows * KERNEL) / sok.size()
            optimizer = sok2.OptimizerWrapper(v1.train.GradientDescentOptimizer(RATE))
            train = optimizer.apply_gradients([(tf.gradients(loss, [table])[0], table)])
            with v1.Session() as running:
                running.run(v1.global_variables_initializer())
                running.run(train)
                running.run(train)
                found[mode] = here(table, running.run(table))
    return found


def v1_saver():
    """What a v1 Saver says of a path that all ranks share, and what it brings back from others."""
    with tempfile.TemporaryDirectory() as own:
        # The ranks of a test run on one machine. Their folders' names are of one length.
        name = tf.constant(np.frombuffer(own.encode(), np.uint8))
        names = comm.current().all_gather(name, "v1_saver_folder").numpy().tobytes()
        found = _v1_saver(own, names[: len(own)].decode())
        comm.current().barrier()  # the folder of rank 0 stays until all have used it
    return found


def _v1_saver(own, shared):
    v1, message = tf.compat.v1, None
    with tf.Graph().as_default():
        table = sok2.Variable(START, name="saved")
        empty, saver = table.assign(tf.zeros_like(table)), v1.train.Saver()
        with v1.Session() as running:
            running.run(v1.global_variables_initializer())
            try:
                saver.save(running, f"{shared}/all")
            except NotImplementedError as error:
                message = str(error)
            path = saver.save(running, f"{own}/model")
            running.run(empty)
            saver.restore(running, path)
            return message, here(table, running.run(table))


def checkpoint(folder):
    """By mode: rows from a tf.train.Checkpoint."""
    found = {}
    for mode, given in modes(sok.size()).items():
        table = sok2.Variable(START, mode=given, name=f"kept_{mode}")
        path = tf.train.Checkpoint(table=table).save(f"{folder}/{mode}")
        table.assign(tf.zeros_like(table))
        tf.train.Checkpoint(table=table).restore(path).expect_partial()
        found[mode] = here(table, table.numpy())
    return found


each_world = pytest.mark.parametrize("world_size", [1, 3])
MODES = ("distributed", "localized")


def whole(parts):
    """The table from the row numbers and rows of each rank."""
    table = np.full([ROWS, DIM], np.nan)
    for numbers, rows in parts:
        table[numbers] = rows
    return table


def gradient():
    of_table = np.zeros([ROWS, DIM])
    of_table[KEYS] = KERNEL
    return of_table


@each_world
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("how", ["eager", "function", "outside"])
def test_norms_are_those_of_one_process(on_threads, world_size, mode, how):
    found = [result[f"{mode} {how}"] for result in on_threads(world_size, clipped)]
    # Each rank has the same batch, and its share of the loss.
    of_kernel = START[KEYS].sum(0) / world_size
    alone = np.sqrt((gradient() ** 2).sum())
    norm = np.sqrt(alone**2 + (of_kernel**2).sum())
    np.testing.assert_allclose([norm for norm, _, _ in found], norm, rtol=1e-5)
    together = whole([part for _, part, _ in found])
    np.testing.assert_allclose(together, gradient() * LIMIT / norm, rtol=1e-5)
    by_itself = whole([part for _, _, part in found])
    np.testing.assert_allclose(by_itself, gradient() * LIMIT / alone, rtol=1e-5)


@each_world
@pytest.mark.parametrize("mode", MODES)
def test_a_session_trains(on_threads, world_size, mode):
    found = whole([result[mode] for result in on_threads(world_size, session)])
    np.testing.assert_allclose(found, START - 2 * RATE * gradient(), rtol=1e-5)


@each_world
def test_a_v1_saver_writes_all_rows_or_raises(on_threads, world_size):
    results = on_threads(world_size, v1_saver)
    np.testing.assert_array_equal(whole([rows for _, rows in results]), START)
    for message, _ in results:
        if world_size == 1:
            assert message is None
        else:
            assert "'saved:0'" in message and f"{world_size} ranks" in message


@pytest.mark.ranks
def test_a_checkpoint_keeps_the_rows_of_all_ranks(on_processes, tmp_path):
    results = on_processes(2, checkpoint, tmp_path)
    for mode in MODES:
        np.testing.assert_array_equal(whole([result[mode] for result in results]), START)
