"""Variables of sok2 among TensorFlow's own tools: norms, checkpoints, savers, sessions."""

import functools
import tempfile

import numpy as np
import tensorflow as tf

ROWS, DIM, RATE, LIMIT = 8, 3, 0.5, 1.0
KEYS = [0, 1, 6]
KERNEL = np.array([1.0, 2.0, 3.0], np.float32)
START = np.arange(ROWS * DIM, dtype=np.float32).reshape(ROWS, DIM) / 10


def checks(world_size):
    return {"clipped": clipped, "session": session, "v1_saver": v1_saver}


def modes(world_size):
    return {"distributed": None, "localized": f"localized:{world_size - 1}"}


def here(variable, rows):
    return variable._rows_here(), rows


def clipped():
    """By mode: the norm, and parts of gradients that were clipped together and one by one."""
    import sok_like as sok
    from sok_like import sok2

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
    import sok_like as sok
    from sok_like import sok2

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
    from sok_like.runtime.ranks import comm

    with tempfile.TemporaryDirectory() as own:
        # The ranks of a test run on one machine. Their folders' names are of one length.
        name = tf.constant(np.frombuffer(own.encode(), np.uint8))
        names = comm.current().all_gather(name, "v1_saver_folder").numpy().tobytes()
        found = _v1_saver(own, names[: len(own)].decode())
        comm.current().barrier()  # the folder of rank 0 stays until all have used it
    return found


def _v1_saver(own, shared):
    from sok_like import sok2

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


def checkpoint():
    """By mode: rows from a tf.train.Checkpoint, in a program that has no other tables."""
    import horovod.tensorflow as hvd

    from sok_like import sok2

    hvd.init()
    sok2.init(use_legacy_optimizer=False)
    found, folder = {}, hvd.broadcast_object(tempfile.mkdtemp())
    for mode, given in modes(hvd.size()).items():
        table = sok2.Variable(START, mode=given, name=f"kept_{mode}")
        path = tf.train.Checkpoint(table=table).save(f"{folder}/{mode}")
        table.assign(tf.zeros_like(table))
        tf.train.Checkpoint(table=table).restore(path).expect_partial()
        found[mode] = here(table, table.numpy())
    return found
