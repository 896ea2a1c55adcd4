"""Two `tf.function`s on one table, from several threads; NumPy says what the rows must be.

    python -m tests.lookup.test_stress_ops --ops build-asan-ops/_ops.so    (`make asan tsan`)

For a library that was built with sanitizers (tools/sanitize_ops.sh): they end the process where
they find something.
"""

import argparse
import collections
import concurrent.futures
import pathlib
import time

import numpy as np
import tensorflow as tf

from tests.training import train_step

DIM, RATE, NUM_KEYS, BATCH = 8, 0.25, 5000, 256


class Stress:
    """A table of which every row starts at 1, and how often each key was in a step."""

    def __init__(self, optimizer):
        import sok_like as sok

        self.sok, self.name = sok, type(optimizer).__name__.lower()
        self.layer = sok.All2AllDenseEmbedding(
            None, DIM, 1, 1, dynamic_input=True, name=self.name, embedding_initializer="ones"
        )
        self.variable = self.layer.embedding_variable
        self.optimizer = sok.OptimizerWrapper(optimizer)
        self.optimizer.build([self.variable])
        self.calls = collections.Counter()
        self.taken = [np.zeros(NUM_KEYS, np.int64) for _ in range(2)]  # by thread that trains
        signature = [tf.TensorSpec([None], tf.int64)]
        self.train = tf.function(self._train, input_signature=signature)
        self.read = tf.function(self._read, input_signature=signature)

    def _train(self, keys):
        def loss_of():
            return tf.reduce_sum(self.layer(keys, training=True))

        train_step(self.optimizer, self.variable, loss_of)

    def _read(self, keys):
        rows = self.layer(keys, training=False)
        with tf.control_dependencies([rows]):
            return rows, self.variable.find(keys)[1]

    def run(self, seconds):
        """Calls both functions, and exports, from five threads; raises what one of them raised."""
        end = time.monotonic() + seconds
        kinds = [self._trains(0), self._trains(1), self._reads(2), self._reads(3), self._exports()]

        def repeat(kind):
            while time.monotonic() < end:
                self.calls[next(kind)] += 1

        with concurrent.futures.ThreadPoolExecutor(len(kinds)) as pool:
            list(pool.map(repeat, kinds))

    def _trains(self, number):
        rng = np.random.default_rng(number)
        while True:
            keys = rng.integers(0, NUM_KEYS, BATCH)
            self.train(tf.constant(keys))
            np.add.at(self.taken[number], keys, 1)
            yield "steps"

    def _reads(self, number):
        rng = np.random.default_rng(number)
        while True:
            keys = rng.integers(0, 2 * NUM_KEYS, BATCH)
            rows, found = (tensor.numpy() for tensor in self.read(tf.constant(keys)))
            # All columns have the same gradients, so a row of two instants shows.
            assert (rows == rows[:, :1]).all(), "a row of two instants"
            assert (rows[~found] == 1).all(), "a row of a key that is not there"
            yield "reads"

    def _exports(self):
        spare = np.arange(100) + 3 * NUM_KEYS  # nobody trains them
        while True:
            keys, _ = self.sok.export(self.variable)
            assert len(np.unique(keys)) == len(keys), "a key twice"
            self.sok.assign(self.variable, spare, np.ones([len(spare), DIM], np.float32))
            self.variable.erase(spare)
            yield "exports"

    def check(self):
        """Fails unless the table holds the keys, and under SGD the rows, of all steps."""
        steps = sum(self.taken)
        keys, rows = (tensor.numpy() for tensor in self.sok.export(self.variable))
        assert sorted(keys.tolist()) == np.flatnonzero(steps).tolist()
        assert np.isfinite(rows).all() and (rows < 1).all()
        if self.name == "sgd":
            expected = np.repeat(1 - RATE * steps[keys][:, None], DIM, 1)
            np.testing.assert_array_equal(rows, expected.astype(np.float32))


def run(seconds):
    """Half of the time under SGD, half under Adam, where lookups write as well: they apply the
    steps that rows owe. How many calls there were, by optimizer."""
    calls = {}
    for optimizer in (tf.keras.optimizers.SGD(RATE), tf.keras.optimizers.Adam(RATE)):
        stress = Stress(optimizer)
        stress.run(seconds / 2)
        stress.check()
        calls[stress.name] = dict(stress.calls)
    return calls


def test_functions_share_a_table_from_several_threads(sok):
    """The short form."""
    for calls in run(1).values():
        assert min(calls[kind] for kind in ("steps", "reads", "exports")) > 0


def main():
    import sok_like as sok
    from sok_like.runtime.native import libraries

    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--ops", type=pathlib.Path, help="in the place of sok_like/_ops.so")
    parser.add_argument("--seconds", type=float, default=60)
    arguments = parser.parse_args()
    if arguments.ops:
        libraries._ops_file = arguments.ops.resolve()
    sok.Init(global_batch_size=BATCH, seed=7)
    print(f"{run(arguments.seconds)}: no difference", flush=True)


if __name__ == "__main__":
    main()
