"""Random programs on several ranks: what each lookup gives, step by step, against a dictionary.

All ranks draw the same program from one seed: which tables a step looks up, in which order,
eagerly, in a function or in a loop, with which keys on which rank, and where something is wrong. So
each rank knows what all of them do, and a dictionary of rows says what must come out. All
numbers are small multiples of 1/4: sums are exact in any order.
"""

import collections
import functools
import itertools

import numpy as np
import tensorflow as tf

DIM, RATE, ROOM, LENGTH = 2, 0.25, 24, 3
NAMES = ("rows", "hashed", "full", "group0", "group1")
ORDERS = (("rows",), ("full", "hashed"), ("hashed", "group", "rows"), ("group", "full", "hashed"))
MODES = ("eager", "function", "loop")


def checks(world_size):
    return {} if world_size == 1 else {"random_steps": functools.partial(run, seed=1, steps=60)}


def main(seed, steps):
    """`run` in a process of its own, with two devices."""
    import sok_like as sok

    device = tf.config.list_physical_devices("CPU")[0]
    tf.config.set_logical_device_configuration(device, [tf.config.LogicalDeviceConfiguration()] * 2)
    sok.Init(global_batch_size=12, seed=7)
    return run(seed, steps)


def run(seed, steps):
    """Counts of the steps by mode and outcome. AssertionError where a step gave something else."""
    from sok_like.runtime import comm

    program = _Program(comm.current().rank, comm.current().world_size)
    counts = collections.Counter()
    for number in range(steps):
        rng = np.random.default_rng([seed, number])
        try:
            counts[program.step(rng)] += 1
        except AssertionError as error:
            raise AssertionError(f"step {number} of seed {seed}: {error}") from error
    return dict(counts)


class _Program:
    def __init__(self, rank, world_size):
        import sok_like as sok

        self.rank, self.world_size = rank, world_size
        self.start = {name: float(i) for i, name in enumerate(NAMES)}
        self.moved = collections.Counter()  # (table, key) -> by how much its row went down

        def layer(name, capacity, **kwargs):
            constant = tf.keras.initializers.Constant(self.start[name])
            return sok.All2AllDenseEmbedding(
                capacity, DIM, 1, 1, dynamic_input=True, name=f"program_{name}",
                embedding_initializer=constant, **kwargs,
            )  # fmt: skip

        self.layers = {
            "rows": layer("rows", 8, use_hashtable=False),
            "hashed": layer("hashed", None),
            "full": layer("full", ROOM),
        }
        self.tables = {name: each.embedding_variable for name, each in self.layers.items()}
        for name in ("group0", "group1"):
            constant = tf.keras.initializers.Constant(self.start[name])
            self.tables[name] = sok.EmbeddingVariable(
                DIM, name=f"program_{name}", initializer=constant
            )
        self.optimizer = sok.OptimizerWrapper(tf.keras.optimizers.SGD(RATE))
        self.optimizer.build(list(self.tables.values()))
        for name, table in self.tables.items():  # so that only what is meant to be full is
            if name != "rows":
                sok.assign(table, np.arange(16), np.full([16, DIM], self.start[name]))
        self.functions = {}

    def step(self, rng):
        """One step; its mode and how it ended."""
        order, mode = ORDERS[rng.integers(len(ORDERS))], MODES[rng.integers(len(MODES))]
        names = [n for part in order for n in (("group0", "group1") if part == "group" else [part])]
        repeats = 3 if mode == "loop" else 1
        shape = (self.world_size, repeats, len(names), LENGTH)
        keys = rng.integers(0, 8 if self.world_size == 2 else 12, shape)
        weights = rng.integers(-3, 4, (self.world_size, len(names))).astype(np.float32)
        wrong, culprit = self._spoil(rng, names, keys)
        mine = [keys[self.rank, :, i] for i in range(len(names))]
        if wrong == "full" and self.rank == culprit:
            crowd = np.arange(16, 16 + ROOM) * self.world_size  # all of them rank 0's
            mine[names.index("full")] = np.tile(crowd, (repeats, 1))
        call = self._call(order, mode)
        try:
            found = call([tf.constant(k) for k in mine], tf.constant(weights[self.rank]))
        except tf.errors.OpError as error:
            assert wrong, f"{mode} {order}: {error.message}"
            kind = {"rows": "InvalidArgumentError", "full": "ResourceExhaustedError"}[wrong]
            assert type(error).__name__ == kind, f"{kind} expected: {error!r}"
            owner = culprit if wrong == "rows" else 0
            assert f"rank {owner}: " in error.message and f"program_{wrong}" in error.message
            return f"{mode} {wrong}"
        assert not wrong, f"{mode} {order}: rank {culprit} did not fail"
        for i, (name, rows) in enumerate(zip(names, found, strict=True)):
            expected = [[self._row(name, key)] * DIM for key in mine[i].ravel()]
            np.testing.assert_array_equal(rows.numpy().reshape(-1, DIM), expected, f"{mode} {name}")
        if mode == "loop":
            return "loop fine"
        for r, i in itertools.product(range(self.world_size), range(len(names))):
            for key in keys[r, :, i].ravel().tolist():
                self.moved[names[i], key] += RATE * float(weights[r, i])
        return f"{mode} fine"

    def _row(self, name, key):
        return self.start[name] - self.moved[name, int(key)]

    def _spoil(self, rng, names, keys):
        """Which table fails, if any, and the rank whose keys are to blame."""
        kind, culprit = rng.integers(8), int(rng.integers(self.world_size))
        if kind == 0 and "rows" in names:
            keys[culprit, :, names.index("rows"), -1] = 8 * self.world_size + 1
            return "rows", culprit
        if kind == 1 and "full" in names:
            return "full", culprit
        return None, None

    def _call(self, order, mode):
        if mode == "eager":
            return functools.partial(self._train, order)
        if (order, mode) not in self.functions:
            step = self._train if mode == "function" else self._look_up_in_loop
            self.functions[order, mode] = tf.function(
                functools.partial(step, order), reduce_retracing=True
            )
        return self.functions[order, mode]

    def _train(self, order, keys, weights):
        """Looks up, and trains with the sum of all rows, each table's times its weight."""
        with tf.GradientTape() as tape:
            found = self._lookups(order, [tf.reshape(k, [-1]) for k in keys])
            loss = tf.reduce_sum(self._sums(found) * weights)
        self._apply(tape, loss, order)
        return found

    def _look_up_in_loop(self, order, keys, weights):
        """Without training: TensorFlow's gradient of a loop is dense, which a table's cannot be."""
        arrays = [
            tf.TensorArray(tf.float32, tf.shape(k)[0], element_shape=[None, DIM]) for k in keys
        ]

        def body(i, *arrays):
            found = self._lookups(order, [k[i] for k in keys])
            return i + 1, *(a.write(i, rows) for a, rows in zip(arrays, found, strict=True))

        _, *arrays = tf.while_loop(lambda i, *_: i < tf.shape(keys[0])[0], body, (0, *arrays))
        return [array.concat() for array in arrays]

    def _lookups(self, order, keys):
        from sok_like.lookup.hash_lookup import HashFeature, lookup

        found, keys = [], iter(keys)
        for part in order:
            if part == "group":
                features = [HashFeature(self.tables[n], next(keys)) for n in ("group0", "group1")]
                found += lookup(features, training=True, name="program_group")
            else:
                found.append(self.layers[part](next(keys), training=True))
        return found

    def _sums(self, found):
        return tf.stack([tf.reduce_sum(rows[:, 0]) + tf.reduce_sum(rows[:, 1]) for rows in found])

    def _apply(self, tape, loss, order):
        names = [n for part in order for n in (("group0", "group1") if part == "group" else [part])]
        tables = [self.tables[name] for name in names]
        self.optimizer.apply_gradients(zip(tape.gradient(loss, tables), tables, strict=True))
