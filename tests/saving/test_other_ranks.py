"""What some ranks wrote, other numbers of them read: the training goes on as if nothing had been.

A file is written in the middle of a training. Readers must come to its end as well, which they do
not if a row, a slot row, a step or a weight is another one.
"""

import itertools

import numpy as np
import pytest
import tensorflow as tf

import sok_like as sok
import sok_like.dist_model_parallel as dmp
from sok_like.lookup.dense_lookup import as_tf_table
from sok_like.runtime.framework.running_keras import is_keras_3
from tests.checks import files
from tests.checks.files import KINDS, TABLES, WAYS, X, Y, by_key, check_same, fit, made, mine
from tests.checks.serving import model_parallel

of_keras = pytest.mark.keras(slow=True)
RATE = 0.05


def near(found, expected):
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-5)


# ---- models with every kind of state, in Keras' files and checkpoints ----


def answers(model):
    return [model.predict_on_batch(X), *model.get_layer("files_dense").get_weights(all_ranks=True)]


def write_models(folder):
    """What was written; the answers after more steps; and what is there of checkpoints."""
    model = made(whole=True)
    fit(model, 2)
    files.write(model, folder)
    manager = tf.train.CheckpointManager(tf.train.Checkpoint(model), str(folder / "all"), 2)
    for _ in range(3):
        manager.save()
    before = files.state(model)
    fit(model, 2, 5)
    return before, answers(model), sorted(path.name for path in (folder / "all").iterdir())


def read_models(kind, folder):
    model = files.read(kind, folder, lambda: made(whole=True))
    after = files.state(model)
    fit(model, 2, 5)
    return after, answers(model)


MORE = [(3, [2]), (1, [3]), (4, [3]), (2, [4])]


@of_keras
@pytest.mark.ranks
@pytest.mark.parametrize(
    "writers, all_readers",
    [(2, [2, 1]), (1, [2]), *(pytest.param(*pair, marks=pytest.mark.slow) for pair in MORE)],
)
def test_models(on_processes, tmp_path, writers, all_readers):
    written = on_processes(writers, write_models, tmp_path)
    (expected, left) = written[0][1:]
    tables = [name for name in left if name.endswith(".tables")]
    # A manager keeps two; one rank has its tables among TensorFlow's own files.
    assert tables == (["ckpt-2.tables", "ckpt-3.tables"] if writers > 1 else [])
    for readers, kind in itertools.product(all_readers, KINDS):
        read = on_processes(readers, read_models, kind, tmp_path)
        for table in written[0][0]:
            before, after = (by_key([part[0][table] for part in of]) for of in (written, read))
            assert len(before["keys"])
            check_same(after, before, (kind, table))
        for rank, (after, found) in enumerate(read):
            for table in after.values():
                assert (table["keys"].view(np.uint64) % np.uint64(readers) == rank).all()
            for one, other in zip(found, expected, strict=True):
                (np.testing.assert_array_equal if writers == readers else near)(one, other)


# ---- other programs ----


class Tape:
    """Dense tables and a loop; slot variables of older optimizers can be read by no name."""

    def __init__(self, kind):
        self.layer = dmp.DistributedEmbedding(
            [tf.keras.layers.Embedding(*size) for size in TABLES],
            strategy="memory_balanced",
            name=f"tape_{kind}",
            **WAYS,
        )
        self.layer.set_weights([np.cos(np.arange(n * m)).reshape(n, m) for n, m in TABLES])
        is_v1 = kind == "v1"
        adam = tf.compat.v1.train.AdamOptimizer if is_v1 else tf.keras.optimizers.legacy.Adam
        self.optimizer = adam(RATE)
        self.checkpoint = tf.train.Checkpoint(layer=self.layer, optimizer=self.optimizer)

    def step(self):
        tables = [as_tf_table(table) for table in self.layer.trainable_variables]
        with dmp.DistributedGradientTape(tf.GradientTape()) as tape:
            found = self.layer([tf.constant(mine(X))] * len(TABLES))
            rows = [tf.reduce_sum(each, [1, 2]) for each in found]
            loss = tf.reduce_mean((tf.stack(rows, 1) - mine(Y)) ** 2)
        self.optimizer.apply_gradients(zip(tape.gradient(loss, tables), tables, strict=True))

    def save(self, folder):
        self.checkpoint.write(str(folder / "c"))

    def load(self, folder):
        self.checkpoint.read(str(folder / "c")).assert_existing_objects_matched()

    def found(self):
        return dict(enumerate(self.layer.get_weights(all_ranks=True)))


class Parallel:
    """Keras' ModelParallel: a table by rows, one by columns, and a kernel by rows."""

    def __init__(self, kind):
        self.kind, of = kind, tf.keras.layers
        layouts = {
            "parallel_rows/embeddings": ("model", None),
            "parallel_columns/embeddings": (None, "model"),
            "parallel_top/kernel": ("model", None),
        }
        with model_parallel(layouts).scope():
            tf.keras.utils.set_random_seed(3)
            ids = tf.keras.Input([2], dtype="int64")
            rows = of.Embedding(24, 4, name="parallel_rows")(ids)
            columns = of.Embedding(24, 12, name="parallel_columns")(ids)
            both = of.Flatten()(of.Concatenate()([rows, columns]))
            self.model = tf.keras.Model(ids, of.Dense(1, name="parallel_top")(both))
            self.model.compile(tf.keras.optimizers.Adam(RATE), "mse", run_eagerly=True)

    def step(self):
        self.model.train_on_batch(X, Y)

    def save(self, folder):
        files.write(self.model, folder, [self.kind])

    def load(self, folder):
        files.load(self.kind, self.model, folder)

    def found(self):
        return dict(enumerate(map(np.array, self.model.weights)))


class Session:
    """One hash table in a graph, by TensorFlow 1's Adam; a stock step counts."""

    def __init__(self, kind):
        v1 = tf.compat.v1
        with tf.Graph().as_default() as graph:
            ids, targets = tf.constant(mine(X)), tf.constant(mine(Y))
            table = sok.EmbeddingVariable(4, name="other_ranks_session")
            step = v1.train.get_or_create_global_step()
            rows = tf.reduce_sum(tf.gather(table, ids), [1, 2])[:, tf.newaxis]
            loss = tf.reduce_mean((rows - targets) ** 2) / sok.size()
            optimizer = sok.OptimizerWrapper(v1.train.AdamOptimizer(RATE))
            self.train = optimizer.minimize(loss, global_step=step)
            self.content, self.saver = [*sok.export(table), step], v1.train.Saver()
            self.session = v1.Session(graph=graph)
            self.session.run([v1.global_variables_initializer(), table.initializer])

    def step(self):
        self.session.run(self.train)

    def save(self, folder):
        with self.session.graph.as_default():
            self.saver.save(self.session, str(folder / "model.ckpt"))

    def load(self, folder):
        with self.session.graph.as_default():
            self.saver.restore(self.session, str(folder / "model.ckpt"))

    def found(self):
        keys, rows, step = self.session.run(self.content)
        return {**dict(zip(keys.tolist(), rows, strict=True)), "step": step}


WRITTEN, STEPS = 3, 3  # before a file is written, and behind it


def run(program, kind, folder, writes):
    running = program(kind)
    for _ in range(WRITTEN if writes else 1):
        running.step()
    running.save(folder) if writes else running.load(folder)  # which replaces what is there
    for _ in range(STEPS):
        running.step()
    return running.found()


def check(on_ranks, pair, program, kind, folder):
    expected, found = {}, {}
    for ranks, values in zip(pair, (expected, found), strict=True):
        for each in on_ranks(ranks, run, program, kind, folder, values is expected):
            values.update(each)
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        near(found[name], value)


@of_keras
@pytest.mark.ranks
@pytest.mark.parametrize("pair", [(2, 1), (1, 2)])
@pytest.mark.parametrize("kind", ["weights", "checkpoint"])
def test_shards_of_model_parallel(on_processes, tmp_path, kind, pair):
    check(on_processes, pair, Parallel, kind, tmp_path)


# tf_keras has optimizers that are older than Keras 3's.
OF_THREADS = [(Session, "saver"), (Tape, "v1"), *([] if is_keras_3() else [(Tape, "legacy")])]


@of_keras
@pytest.mark.parametrize("pair", [(1, 3), (3, 2)])
@pytest.mark.parametrize("program, kind", OF_THREADS)
def test_programs(on_threads, tmp_path, program, kind, pair):
    check(on_threads, pair, program, kind, tmp_path)
