"""Keras' `fit` on ranks, each with a part of the batch, against the same steps in NumPy."""

import warnings

import numpy as np
import pytest
import tensorflow as tf

import sok_like as sok
from sok_like import feature_column as fc
from sok_like.runtime.ranks import comm, lookup_options
from sok_like.table.variable import unwrap
from tests.training import rows_by_key, train_step

pytestmark = pytest.mark.keras
BATCH, STEPS, RATE = 12, 3, 0.5  # samples of all ranks in a step
KEYS = np.array([-7, 0, 3, 2**40])


def samples():
    """Keys `[STEPS * BATCH, 2]`, some shared by all samples, and targets `[STEPS * BATCH]`."""
    rng = np.random.default_rng(3)
    keys = rng.choice(KEYS, [STEPS * BATCH, 2])
    return keys, rng.normal(size=STEPS * BATCH).astype(np.float32)


def mine(array):
    """This rank's part of every batch, in order."""
    rank, world_size = comm.current().rank, comm.current().world_size
    steps = array.reshape(STEPS, world_size, BATCH // world_size, *array.shape[1:])
    return steps[:, rank].reshape(-1, *array.shape[1:])


class Distributed(tf.keras.layers.Layer):
    """A layer that looks up rows of one number, zero at first."""

    def __init__(self, name):
        super().__init__(name=name)
        self.lookup = self.make(name)

    def make(self, name):
        options = {"embedding_initializer": "zeros", "name": name}
        return sok.DistributedEmbedding("sum", None, 1, slot_num=2, max_nnz=1, **options)

    def call(self, keys):
        return self.lookup(keys)

    def table(self):
        return self.lookup.table

    def rows(self):
        """This rank's rows, by key."""
        return {key: row for key, (row,) in rows_by_key(self.table()).items()}


class AllToAll(Distributed):
    def make(self, name):
        return sok.All2AllDenseEmbedding(None, 1, 2, 1, embedding_initializer="zeros", name=name)


class Group(Distributed):
    def make(self, name):
        self.weight = sok.EmbeddingVariable(1, name=name, initializer="zeros").as_weight()

    def call(self, keys):
        return sok.group_embedding_lookup([self.table()], [keys], name=self.name)[0]

    def table(self):
        return unwrap(self.weight)


class GroupLayer(Distributed):
    def make(self, name):
        options = {"keys": {"initializer": "zeros"}}
        return sok.GroupEmbedding({"keys": 1}, combiners="sum", table_options=options, name=name)

    def call(self, keys):
        return self.lookup({"keys": keys})["keys"]

    def table(self):
        return self.lookup.tables["keys"]


class Columns(Distributed):
    def make(self, name):
        keys = fc.categorical_column_with_embedding("keys", dtype=tf.int64)
        column = fc.embedding_column(keys, 1, "sum", initializer=tf.zeros_initializer())
        return fc.DenseFeatures([column], name=name)

    def call(self, keys):
        return self.lookup({"keys": tf.sparse.from_dense(keys + 10)})

    def table(self):
        return unwrap(self.lookup.trainable_variables[0])

    def rows(self):
        return {key - 10: row for key, row in super().rows().items()}


class Model(tf.keras.Model):
    """The sum of a sample's rows."""

    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def call(self, keys):
        rows = self.layer(keys)
        return tf.reduce_sum(rows, axis=list(range(1, rows.shape.rank)))


def trained():
    """Rows by key after an epoch of plain gradient descent on the mean squared error."""
    rows = dict.fromkeys(KEYS.tolist(), 0.0)
    keys, targets = samples()
    for step_keys, step_targets in zip(
        np.split(keys, STEPS), np.split(targets, STEPS), strict=True
    ):
        outputs = np.array([sum(rows[key] for key in sample) for sample in step_keys.tolist()])
        slopes = 2 * (outputs - step_targets) / BATCH
        for key in rows:
            rows[key] -= RATE * (slopes @ (step_keys == key).sum(axis=1))
    return rows


def check(parts):
    """The ranks' rows together are the rows trained in NumPy."""
    found = {key: row for part in parts for key, row in part.items()}
    assert found == pytest.approx(trained(), abs=1e-5)


def fit(door):
    """The rank's rows after steps of `fit`, without a word on `gradient_scale`."""
    layer = door(f"fit_{door.__name__.lower()}")
    model = Model(layer)
    model.compile(sok.OptimizerWrapper(tf.keras.optimizers.SGD(RATE)), "mse")
    keys, targets = map(mine, samples())
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*gradient_scale")
        model.fit(keys, targets, batch_size=len(keys) // STEPS, shuffle=False, verbose=0)
    return layer.rows()


@pytest.mark.parametrize("door", [Distributed, AllToAll, Group, GroupLayer, Columns])
def test_the_default_gradient_scale_is_right_under_fit(on_threads, door):
    check(on_threads(2, fit, door))


@pytest.mark.ranks
def test_fit_on_processes(on_processes):
    check(on_processes(2, fit, Distributed))


def test_histograms_of_tensorboard(sok, tmp_path):
    layer = Distributed("histograms")
    model = Model(layer)
    model.compile(sok.OptimizerWrapper(tf.keras.optimizers.SGD(RATE)), "mse")
    keys, targets = samples()
    board = tf.keras.callbacks.TensorBoard(str(tmp_path), histogram_freq=1)
    # It makes a dense tensor of every weight.
    with pytest.raises(TypeError, match="'histograms' has no dense value"):
        model.fit(keys, targets, batch_size=BATCH, shuffle=False, callbacks=[board], verbose=0)
    check([layer.rows()])


def warnings_of_loops():
    """How often two loops of a process are told of `gradient_scale`."""
    lookup_options._warned = False
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for name in ("one", "other"):
            layer = Distributed(name)
            with tf.GradientTape() as tape:
                loss = tf.reduce_sum(layer(tf.constant([[1, 2]], tf.int64)))
            tape.gradient(loss, layer.trainable_variables)
    return [str(w.message) for w in caught if "gradient_scale" in str(w.message)]


@pytest.mark.ranks
def test_a_loop_that_says_no_gradient_scale_warns_once_on_ranks(on_processes):
    assert on_processes(1, warnings_of_loops) == [[]]
    for (told,) in on_processes(2, warnings_of_loops):
        assert "'mean'" in told and "'sum'" in told


@pytest.mark.parametrize(
    "combiner, outputs, rows",
    [
        # Key 1 is used three times, key 5 once; in a mean of two keys each counts half.
        ("sum", [[[1], [0]], [[2], [1]]], {1: [-2.0], 5: [0.0]}),
        ("mean", [[[1], [0]], [[1], [1]]], {1: [-1.5], 5: [0.5]}),
        (None, [[[[1], [0]], [[0], [0]]], [[[1], [1]], [[0], [1]]]], {1: [-2.0], 5: [0.0]}),
    ],
)
def test_padding(on_threads, combiner, outputs, rows):
    """-1 is padding; rank 1 has nothing else."""

    def train():
        keys = tf.constant([[[1, -1], [-1, -1]], [[1, 5], [-1, 1]]], tf.int64)
        if sok.rank():
            keys = tf.fill([1, 2, 2], tf.constant(-1, tf.int64))
        options = {"embedding_initializer": "ones", "pad_key": -1, "gradient_scale": "sum"}
        if combiner is None:
            layer = sok.All2AllDenseEmbedding(None, 1, 2, 2, **options)
        else:
            layer = sok.DistributedEmbedding(combiner, None, 1, 2, 2, **options)
        found = layer(keys).numpy()
        optimizer = sok.OptimizerWrapper(tf.keras.optimizers.SGD(1.0))
        train_step(optimizer, layer.trainable_variables, lambda: tf.reduce_sum(layer(keys)))
        assert found.tolist() == outputs if sok.rank() == 0 else not found.any()
        return rows_by_key(layer.table)

    found = {key: row for of_rank in on_threads(2, train) for key, row in of_rank.items()}
    assert found == rows
