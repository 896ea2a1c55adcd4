"""Files in `tests/saving/stored/`, which an earlier revision wrote: later ones read them.

    python -m sok_like.run -np 2 -m tests.saving.test_stored_files tests/saving/stored

writes those of two ranks. Where a format must change, these files stay, and are still read.
"""

import pathlib
import sys

import numpy as np
import pytest
import tensorflow as tf

import sok_like as sok
import sok_like.dist_model_parallel as dmp
from sok_like import sok2

pytestmark = pytest.mark.ranks
STORED = pathlib.Path(__file__).parent / "stored"


def make_model():
    ids = {name: tf.keras.Input([2], dtype="int64", name=name) for name in ("user", "item")}
    twice = {"ev_option": sok.EmbeddingVariableOption(filter_option=sok.CounterFilter(2))}
    options = {"combiners": "sum", "table_options": {"item": twice}, "name": "feat"}
    named = sok.GroupEmbedding({"user": 2, "item": 4}, **options)(ids)
    unnamed = sok.All2AllDenseEmbedding(None, 2, 1, 2, name="alone")(ids["item"])
    dense = [tf.keras.layers.Embedding(n, 2, name=name) for n, name in ((7, "left"), (5, "right"))]
    whole = dmp.DistributedEmbedding(dense, name="whole")([ids["user"]] * 2)
    flat = [tf.keras.layers.Flatten()(rows) for rows in (unnamed, *whole)]
    outputs = tf.keras.layers.Concatenate()([named["user"], named["item"], *flat])
    model = tf.keras.Model(ids, tf.keras.layers.Dense(1, name="last")(outputs))
    model.compile(sok.OptimizerWrapper(tf.keras.optimizers.Adam(0.1)), "mse", run_eagerly=True)
    return model


def train(model, seed):
    """One step, of the same global batch for any number of ranks."""
    random = np.random.default_rng(seed)
    ids = {name: random.integers(0, 5, [4, 2])[sok.rank() :: sok.size()] for name in model.input}
    labels = random.normal(size=[4, 1])[sok.rank() :: sok.size()]
    start_alike = sok.callbacks.BroadcastVariables()
    model.fit(ids, labels, batch_size=4, shuffle=False, verbose=0, callbacks=[start_alike])


def hash_tables(model):
    tables = model.get_layer("feat").tables
    return {**tables, "alone": model.get_layer("alone").table}


def rows_of(model):
    """Arrays of this rank: keys and rows of each table, and the policies' records of one."""
    return {
        f"{name}.{i}": part.numpy()
        for name, table in hash_tables(model).items()
        for i, part in enumerate(table.export() if name == "item" else sok.export(table))
    }


def own_rows(value):
    """A variable of which each rank has rows of its own."""
    variable = sok2.Variable(np.zeros([6, 2], np.float32), name="own")
    variable.assign(tf.fill(variable.shape, value + tf.cast(sok.rank(), tf.float32)))
    return variable


def dense_of(model):
    return [*model.get_layer("whole").get_weights(all_ranks=True), model.get_layer("last").kernel]


def write(folder):
    model, saver = make_model(), sok.Saver()
    for seed in range(2):
        train(model, seed)
        saver.dump(hash_tables(model)["user"], folder / "dump", since="last" if seed else None)
    model.save_weights(folder / "model.weights.h5")
    model.save(folder / "model.keras")
    tf.train.Checkpoint(own=own_rows(1.0)).write(str(folder / "own"))
    tf.train.Checkpoint(model=model, optimizer=model.optimizer).write(str(folder / "model"))
    dense = {f"dense.{i}": np.asarray(value) for i, value in enumerate(dense_of(model))}
    np.savez(folder / f"before{sok.rank()}.npz", **rows_of(model), **dense)
    train(model, 2)
    np.savez(folder / f"after{sok.rank()}.npz", **rows_of(model))


def assert_rows(model, folder, moment, names=("user", "item", "alone"), **tolerance):
    """This rank's keys, rows and records are those of all ranks that wrote."""
    files = [dict(np.load(file)) for file in folder.glob(f"{moment}*.npz")]
    for array, found in rows_of(model).items():
        name = array.partition(".")[0]
        if name in names:
            keys, values = (np.concatenate([f[key] for f in files]) for key in (f"{name}.0", array))
            mine = [i for i in np.argsort(keys) if keys[i] % sok.size() == sok.rank()]
            np.testing.assert_allclose(found, values[mine], err_msg=array, **tolerance)


def read_all(folder, written_by):
    def of_weights():
        model = make_model()
        model.load_weights(folder / "model.weights.h5")
        return model

    def of_checkpoint():
        model = make_model()
        whole = tf.train.Checkpoint(model=model, optimizer=model.optimizer)
        whole.read(str(folder / "model")).expect_partial()
        return model

    dense = np.load(folder / "before0.npz")
    for read in (
        of_weights,
        of_checkpoint,
        lambda: tf.keras.models.load_model(folder / "model.keras"),
    ):
        model = read()
        assert_rows(model, folder, "before", rtol=0)
        for i, value in enumerate(dense_of(model)):
            np.testing.assert_array_equal(value, dense[f"dense.{i}"])
        train(model, 2)
        assert_rows(model, folder, "after", rtol=1e-5)  # by the optimizer's state in the file
    model = make_model()
    sok.Saver().restore(hash_tables(model)["user"], folder / "dump")
    assert_rows(model, folder, "before", ["user"], rtol=0)
    if sok.size() == written_by:
        own = own_rows(5.0)
        tf.train.Checkpoint(own=own).read(str(folder / "own"))
        assert (own.numpy() == 1 + sok.rank()).all()


@pytest.mark.parametrize(("written_by", "num_ranks"), [(1, 1), (2, 1), (2, 2)])
def test_files_of_an_earlier_revision_are_read(on_processes, written_by, num_ranks):
    on_processes(num_ranks, read_all, STORED / str(written_by), written_by)


if __name__ == "__main__":
    sok.Init(global_batch_size=4, seed=7)
    target = pathlib.Path(sys.argv[1], str(sok.size()))
    target.mkdir(parents=True, exist_ok=True)
    write(target)
