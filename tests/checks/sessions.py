"""Lookups in `tf.compat.v1` sessions of several ranks: what each run gave, as each rank saw it.

Each process has two devices, between which tensors travel.
"""

import numpy as np
import tensorflow as tf

from tests.checks import steps

v1 = tf.compat.v1
STEPS, WRONG = 15, 10**6


def main():
    """What this rank found, with TensorFlow's control flow of version 2 and of version 1.

    And in a function, which is called eagerly.
    """
    import sok_like as sok

    device = tf.config.list_physical_devices("CPU")[0]
    tf.config.set_logical_device_configuration(device, [tf.config.LogicalDeviceConfiguration()] * 2)
    sok.Init(global_batch_size=2, seed=7)
    found = {"function": steps.after_an_error()}
    for version in (2, 1):
        (v1.enable_control_flow_v2 if version == 2 else v1.disable_control_flow_v2)()
        with tf.Graph().as_default():
            config = v1.ConfigProto(device_count={"CPU": 2})
            session = v1.Session(config=config)
            session.run(sok.Init(global_batch_size=2, seed=7))
            found[version] = {
                "failing": failing(session, version),
                "fetched": fetched(session, version),
                "trained": trained(session, version),
                "looped": looped(session, version),
                "failing_loop": failing_loop(session, version),
            }
    return found


def _rank():
    from sok_like.runtime.ranks import comm

    return comm.current().rank


def _layer(name, value, **kwargs):
    import sok_like as sok

    initializer = value if callable(value) else tf.keras.initializers.Constant(value)
    return sok.All2AllDenseEmbedding(
        kwargs.pop("capacity", None), 2, 1, 1, dynamic_input=True, name=name,
        embedding_initializer=initializer, **kwargs,
    )  # fmt: skip


def _ramp(shape, dtype=None):
    """Row k is k in all columns."""
    return np.arange(shape[0], dtype=np.float32)[:, None] * np.ones(shape, np.float32)


def failing(session, version):
    """Lookups on two devices, of which the first made fails on one rank in every third run."""
    import sok_like as sok

    bad, good = (v1.placeholder(tf.int64, [None]) for _ in range(2))
    rows_only = _layer(f"rows{version}", 1.0, capacity=8, use_hashtable=False)
    others = [_layer(f"other{version}_{i}", 3.0 + i) for i in range(3)]
    with tf.device("CPU:1"):
        moved = bad + tf.zeros_like(bad)
    fetches = [rows_only(moved), *(layer(good) for layer in others)]
    session.run(v1.global_variables_initializer())
    rank, seen = _rank(), []
    for step in range(STEPS):
        wrong = step % 3 == 1 and rank == step % 2
        feed = {bad: [WRONG if wrong else step % 8], good: [100 * rank + step]}
        try:
            seen.append([float(rows.mean()) for rows in session.run(fetches, feed)])
        except tf.errors.OpError as error:
            seen.append(f"{type(error).__name__}: {error.message}")
    exported = session.run([sok.export(layer.embedding_variable)[0] for layer in others])
    return {"seen": seen, "keys": [sorted(keys.tolist()) for keys in exported]}


def fetched(session, version):
    """Runs that fetch some of the lookups of a graph only, in another order than they were made."""
    keys = v1.placeholder(tf.int64, [None])
    layers = [_layer(f"part{version}_{i}", float(i)) for i in range(4)]
    rows = [layer(keys) for layer in layers]
    never_fed = _layer(f"never_fed{version}", 9.0)(v1.placeholder(tf.int64, [None]))
    assert never_fed is not None
    session.run(v1.global_variables_initializer())
    return [
        [float(found.mean()) for found in session.run([rows[i] for i in order], {keys: [1, 2, 3]})]
        for order in ([3], [2, 0], [3, 2, 1, 0], [1])
    ]


def trained(session, version):
    """Two tables, the second looked up by what the first gave; a step's gradients, and the rows."""
    import sok_like as sok

    keys = v1.placeholder(tf.int64, [None])
    first = _layer(f"first{version}", 2.0, gradient_scale="sum")
    second = _layer(f"second{version}", 5.0, gradient_scale="sum")
    rows = first(keys)
    found = second(keys + tf.cast(rows[:, 0], tf.int64))
    loss = tf.reduce_sum(rows) + 3.0 * tf.reduce_sum(found)
    optimizer = sok.OptimizerWrapper(v1.train.GradientDescentOptimizer(1.0))
    train, again = optimizer.minimize(loss), second(keys + 2)
    session.run(v1.global_variables_initializer())
    session.run(train, {keys: [10 * _rank()]})
    after = session.run([rows, again], {keys: [10 * (1 - _rank())]})
    return [np.asarray(value).ravel().tolist() for value in after]


def looped(session, version):
    """Two loops, one of them within a loop, branches, a function and a lookup, in one run each.

    What the runs gave, with the keys.
    """
    keys, flag = v1.placeholder(tf.int64, [None, None]), v1.placeholder(tf.bool, [])
    names = ("loop", "inner", "yes", "no", "function", "outside")
    layers = {name: _layer(f"{name}{version}", _ramp) for name in names}

    def total(name, keys):
        return tf.reduce_sum(layers[name](keys))

    def loop(body):
        """The sum of `body` of each row of the keys, times 1, 2, .., with 10 iterations at once."""
        return tf.while_loop(
            lambda i, _: i < tf.shape(keys)[0],
            lambda i, so_far: (i + 1, so_far + body(keys[i]) * tf.cast(i + 1, tf.float32)),
            (0, 0.0),
        )[1]

    fetches = [
        loop(lambda row: total("loop", row)),
        loop(lambda row: loop(lambda other: total("inner", row + other))),
        tf.cond(flag, lambda: total("yes", keys[0]), lambda: total("no", keys[0])),
        tf.function(lambda row: total("function", row))(keys[1]),
        total("outside", keys[2]),
    ]
    session.run(v1.global_variables_initializer())
    seen, rank = [], _rank()
    for step in range(6):
        fed = np.random.default_rng([rank, step]).integers(0, 1000, [4, 3 + rank + step % 2])
        found = session.run(fetches, {keys: fed, flag: step % 3 == 0})
        seen.append((fed, [float(value) for value in found]))
    return seen


def failing_loop(session, version):
    """A loop of which the third iteration fails on one rank in every third run."""
    keys = v1.placeholder(tf.int64, [4, 2])
    layer = _layer(f"rows_in_loop{version}", _ramp, capacity=8, use_hashtable=False)
    after = _layer(f"after_loop{version}", _ramp)
    fetch = tf.while_loop(
        lambda i, _: i < 4,
        lambda i, total: (i + 1, total + tf.reduce_sum(layer(keys[i]))),
        (0, 0.0),
    )[1]
    fetches = [fetch, tf.reduce_sum(after(tf.cast(fetch, tf.int64)[None]))]
    session.run(v1.global_variables_initializer())
    rank, seen = _rank(), []
    for step in range(STEPS):
        fed = np.arange(8).reshape(4, 2) + step % 3
        if step % 3 == 1 and rank == step % 2:
            fed[2, 0] = WRONG
        try:
            seen.append([float(value) for value in session.run(fetches, {keys: fed})])
        except tf.errors.OpError as error:
            seen.append(f"{type(error).__name__}: {error.message}")
    return seen
