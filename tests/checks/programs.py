"""Random programs on several ranks: what each lookup gives, step by step, against a dictionary.

All ranks draw the same program from one seed: which tables a step looks up, in which order,
eagerly, in a function or in a loop, with which keys on which rank, and where something is wrong. So
each rank knows what all of them do, and a dictionary of rows says what must come out. All
numbers are small multiples of 1/4: sums are exact in any order.

A lookup is of a layer, of a group of two tables, or of a `dist_model_parallel` layer over two. In a
`tf.compat.v1` session a program of its own runs, without the latter.
"""

import argparse
import collections
import functools
import itertools
import os
import random

import numpy as np
import tensorflow as tf

from tests.ranks import run_ranks
from tests.training import layer_of

DIM, RATE, ROOM, LENGTH = 2, 0.25, 24, 3
NAMES = ("rows", "hashed", "full", "group0", "group1", "dmp0", "dmp1")
PAIRS = {pair: (f"{pair}0", f"{pair}1") for pair in ("group", "dmp")}
ORDERS = (("rows",), ("full", "hashed"), ("hashed", "group", "rows"), ("group", "full", "hashed"))
DMP_ORDERS = (("dmp",), ("hashed", "dmp", "full"), ("rows", "dmp"))
DMP_ROWS = 16
MODES = ("eager", "function", "loop")
SESSION_STEPS = 14
CHUNK = 2000  # steps of one launch of `soak`


def num_steps(world_size):
    """Of random programs in eager calls and functions; `make soak-ranks` makes thousands."""
    return 60 if os.environ.get("SLOW") else {2: 24, 3: 15}[world_size]


def main(seed, steps):
    """`run` in a process of its own, with two devices."""
    import sok_like as sok

    device = tf.config.list_physical_devices("CPU")[0]
    tf.config.set_logical_device_configuration(device, [tf.config.LogicalDeviceConfiguration()] * 2)
    sok.Init(global_batch_size=12, seed=7)
    return run(seed, steps - steps // 4) | run_in_session(seed, steps // 4)


def run(seed, steps):
    """Counts of the steps by mode and outcome. AssertionError where a step gave something else."""
    from sok_like.runtime.ranks import comm

    return _counts(_Program(comm.current().rank, comm.current().world_size), seed, steps)


def run_in_session(seed, steps):
    """The same in a session."""
    import sok_like as sok
    from sok_like.runtime.ranks import comm

    devices = len(tf.config.list_logical_devices("CPU"))
    config = tf.compat.v1.ConfigProto(device_count={"CPU": devices})
    with tf.Graph().as_default(), tf.compat.v1.Session(config=config) as session:
        session.run(sok.Init(global_batch_size=12, seed=7))
        program = _Program(comm.current().rank, comm.current().world_size, session)
        return _counts(program, seed, steps)


def _counts(program, seed, steps):
    counts = collections.Counter()
    for number in range(steps):
        rng = np.random.default_rng([seed, number])
        try:
            counts[program.step(rng)] += 1
        except AssertionError as error:
            raise AssertionError(f"step {number} of seed {seed}: {error}") from error
    return dict(counts)


class _Program:
    def __init__(self, rank, world_size, session=None):
        import sok_like as sok

        self.rank, self.world_size, self.session = rank, world_size, session
        self.orders = ORDERS if session else ORDERS + DMP_ORDERS
        self.modes = ("session",) if session else MODES
        self.start = {name: float(i) for i, name in enumerate(NAMES)}
        self.moved = collections.Counter()  # (table, key) -> by how much its row went down

        options = {"rows": {"use_hashtable": False, "capacity": 8}, "full": {"capacity": ROOM}}
        self.layers = {
            name: layer_of(f"program_{name}", self.start[name], DIM, **options.get(name, {}))
            for name in ("rows", "hashed", "full")
        }
        self.tables = {name: each.embedding_variable for name, each in self.layers.items()}
        for name in ("group0", "group1"):
            constant = tf.keras.initializers.Constant(self.start[name])
            self.tables[name] = sok.EmbeddingVariable(
                DIM, name=f"program_{name}", initializer=constant
            )
        if session:
            stock = tf.compat.v1.train.GradientDescentOptimizer(RATE)
            self.optimizer = sok.OptimizerWrapper(stock)
        else:
            self.optimizer = sok.OptimizerWrapper(tf.keras.optimizers.SGD(RATE))
            self.optimizer.build(list(self.tables.values()))
            self._add_dmp()
        filled = [  # so that only what is meant to be full is
            sok.assign(table, np.arange(16), np.full([16, DIM], self.start[name]))
            for name, table in self.tables.items()
            if name != "rows"
        ]
        self.functions = {}
        if session:
            self.functions = {order: self._ops_of_session(order) for order in self.orders}
            session.run(tf.compat.v1.global_variables_initializer())
            session.run([table.initializer for table in self.tables.values()])
            session.run(filled)

    def _add_dmp(self):
        from sok_like import dist_model_parallel as dmp

        tables = [
            dmp.Embedding(DMP_ROWS, DIM, combiner=None, name=f"program_{name}")
            for name in PAIRS["dmp"]
        ]
        self.dmp = dmp.DistributedEmbedding(tables, "memory_balanced", name="program_dmp")
        starts = [self.start[name] for name in PAIRS["dmp"]]
        self.dmp.set_weights([np.full([DMP_ROWS, DIM], start, np.float32) for start in starts])
        self.dmp_optimizer = dmp.DistributedOptimizer(tf.keras.optimizers.SGD(RATE))

    def step(self, rng):
        """One step; its mode and how it ended."""
        order = self.orders[rng.integers(len(self.orders))]
        mode = self.modes[rng.integers(len(self.modes))]
        names = _names_of(order)
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
            found = call(mine, weights[self.rank])
        except tf.errors.OpError as error:
            assert wrong, f"{mode} {order}: {error.message}"
            kind = "ResourceExhaustedError" if wrong == "full" else "InvalidArgumentError"
            assert type(error).__name__ == kind, f"{kind} expected: {error!r}"
            owner = 0 if wrong == "full" else culprit
            assert f"rank {owner}: " in error.message and f"program_{wrong}" in error.message
            return f"{mode} {wrong}"
        assert not wrong, f"{mode} {order}: rank {culprit} did not fail"
        for i, (name, rows) in enumerate(zip(names, found, strict=True)):
            expected = [[self._row(name, key)] * DIM for key in mine[i].ravel()]
            rows = np.asarray(rows).reshape(-1, DIM)
            np.testing.assert_array_equal(rows, expected, f"{mode} {name}")
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
        if kind == 2 and "dmp1" in names:
            keys[culprit, :, names.index("dmp1"), -1] = DMP_ROWS
            return "dmp", culprit
        return None, None

    def _call(self, order, mode):
        if mode == "session":
            return functools.partial(self._run, order)
        step = self._look_up_in_loop if mode == "loop" else self._train
        call = functools.partial(step, order)
        if mode != "eager":
            if (order, mode) not in self.functions:
                self.functions[order, mode] = tf.function(call, reduce_retracing=True)
            call = self.functions[order, mode]
        return lambda keys, weights: call([tf.constant(k) for k in keys], tf.constant(weights))

    def _ops_of_session(self, order):
        """Placeholders, the rows that were read, and the op that trains."""
        names = _names_of(order)
        fed = [tf.compat.v1.placeholder(tf.int64, [None, None]) for _ in names]
        fed.append(tf.compat.v1.placeholder(tf.float32, [len(names)]))
        found = self._lookups(order, [tf.reshape(k, [-1]) for k in fed[:-1]])
        tables = [self.tables[name] for name in names]
        gradients = tf.gradients(tf.reduce_sum(self._sums(found) * fed[-1]), tables)
        return fed, found, self.optimizer.apply_gradients(zip(gradients, tables, strict=True))

    def _run(self, order, keys, weights):
        """A run of the session that trains."""
        fed, found, train = self.functions[order]
        return self.session.run([found, train], dict(zip(fed, [*keys, weights], strict=True)))[0]

    def _train(self, order, keys, weights):
        """Looks up, and trains with the sum of all rows, each table's times its weight."""
        with tf.GradientTape() as tape:
            found = self._lookups(order, [tf.reshape(k, [-1]) for k in keys])
            # The gradient of these tables is the mean over ranks.
            scale = [self.world_size if n in PAIRS["dmp"] else 1 for n in _names_of(order)]
            loss = tf.reduce_sum(self._sums(found) * weights * tf.constant(scale, tf.float32))
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
            elif part == "dmp":
                found += self.dmp([next(keys), next(keys)])
            else:
                found.append(self.layers[part](next(keys), training=True))
        return found

    def _sums(self, found):
        return tf.stack([tf.reduce_sum(rows[:, 0]) + tf.reduce_sum(rows[:, 1]) for rows in found])

    def _apply(self, tape, loss, order):
        tables = [self.tables[name] for name in _names_of(order) if name not in PAIRS["dmp"]]
        dense = self.dmp.trainable_variables if "dmp" in order else []
        gradients = tape.gradient(loss, [*tables, *dense])
        pairs = list(zip(gradients, [*tables, *dense], strict=True))
        if tables:
            self.optimizer.apply_gradients(pairs[: len(tables)])
        if dense:
            self.dmp_optimizer.apply_gradients(pairs[len(tables) :])


def _names_of(order):
    return [name for part in order for name in PAIRS.get(part, [part])]


def soak():
    """Many steps on 2 and 3 ranks: `make soak-ranks`. Fails where a rank found something else."""
    parser = argparse.ArgumentParser(description=soak.__doc__)
    parser.add_argument("--steps", type=int, default=20_000, help="in total")
    parser.add_argument("--seed", type=int, default=random.randrange(2**31))
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 3])
    arguments = parser.parse_args()
    done = 0
    while done < arguments.steps:
        ranks = arguments.ranks[done // CHUNK % len(arguments.ranks)]
        args = {"seed": arguments.seed + done, "steps": min(CHUNK, arguments.steps - done)}
        timeout = 120 + args["steps"]  # a step takes milliseconds; a hang is ended by its message
        results = run_ranks("tests.checks.programs:main", ranks, args=args, timeout=timeout)
        done += args["steps"]
        print(f"{done} steps, {ranks} ranks, seed {args['seed']}: {results[0]}", flush=True)


if __name__ == "__main__":
    soak()
