"""The same bits on any number of ranks, in any order of arrival, with any number of threads."""

import json
import os

import ml_dtypes
import numpy as np
import pytest
import tensorflow as tf

from sok_like.runtime.ranks import comm
from tests import forks
from tests.training import layer_of, rows_by_key, train_step

KEYS = np.array([0, 1, 2, 3, -1, -2, 7, 2**40 + 5, -(2**63), 2**63 - 1, 11, 12], np.int64)
ROW_DTYPES = {"bfloat16": ml_dtypes.bfloat16, "float16": np.float16}


def read_and_inserted(sok, initializer):
    """Rows of KEYS: read, then inserted in an order of each rank's own, and exported."""
    layer = layer_of("fresh", initializer, 5)
    read = layer(tf.constant(KEYS), training=False).numpy()
    order = np.random.default_rng(comm.current().rank).permutation(len(KEYS))
    for part in np.array_split(order, 3):
        layer(tf.constant(KEYS[part]), training=True)
    after = layer(tf.constant(KEYS), training=False).numpy()
    return read, after, *(part.numpy() for part in sok.export(layer.embedding_variable))


@pytest.mark.parametrize("initializer", ["random_uniform", "truncated_normal", "glorot_uniform"])
def test_initial_rows(sok, on_threads, initializer):
    alone, exported = read_and_inserted(sok, initializer)[0], {}
    for read, after, keys, rows in on_threads(3, read_and_inserted, sok, initializer):
        assert read.tobytes() == after.tobytes() == alone.tobytes()
        exported.update(zip(keys.tolist(), rows, strict=True))
    assert set(exported) == set(KEYS.tolist())
    for key, row in zip(KEYS.tolist(), alone, strict=True):
        assert exported[key].tobytes() == row.tobytes()


def rows_of_16_bits(sok, dtype):
    """What a rank exports after steps in which each key is looked up by one rank."""
    ranks = comm.current()
    layer = layer_of(f"rows_{dtype}", None, 5, row_dtype=dtype, gradient_scale="sum")
    variable = layer.embedding_variable
    optimizer = sok.OptimizerWrapper(tf.keras.optimizers.Adagrad(0.1))
    for step in range(4):
        weights = np.random.default_rng(step).normal(size=[len(KEYS), 5]).astype(np.float32)
        mine = (np.arange(len(KEYS)) - ranks.rank - step) % ranks.world_size == 0
        keys, of_keys = tf.constant(KEYS[mine]), weights[mine]
        train_step(optimizer, variable, lambda k=keys, w=of_keys: tf.reduce_sum(layer(k) * w))
    return rows_by_key(layer.table)


@pytest.mark.parametrize("dtype", ROW_DTYPES)
def test_rows_of_16_bits(sok, on_threads, dtype):
    together = {}
    for of_rank in on_threads(2, rows_of_16_bits, sok, dtype):
        together.update(of_rank)
    assert len(together) == len(KEYS) and together == rows_of_16_bits(sok, dtype)
    for row in together.values():
        values = np.array(row, np.float32)
        np.testing.assert_array_equal(values, values.astype(ROW_DTYPES[dtype]))


def trained(run):
    """Rows and weights after steps in which ranks share their keys, none of whose sums is exact."""
    import sok_like as sok

    layer = sok.DistributedEmbedding("mean", None, 5, 2, 3, name="trained", gradient_scale="sum")
    head = tf.keras.layers.Dense(1, kernel_initializer="ones")
    head.build([None, 10])
    variables = [*layer.trainable_variables, *head.trainable_variables]
    optimizer = sok.optimizers.LazyAdam(0.1)
    optimizer.build(variables)

    @tf.function
    def step(keys, weights):
        def loss_of():
            outputs = head(tf.reshape(layer(keys), [-1, 10]))
            return tf.reduce_sum(tf.tanh(outputs[:, 0]) * weights)

        train_step(optimizer, variables, loss_of)

    for number in range(20):
        rng = np.random.default_rng([number, sok.rank()])
        weights = tf.constant(rng.normal(size=30), tf.float32)
        step(tf.constant(rng.choice(KEYS, [30, 2, 3])), weights)
    return [np.array(each).tobytes() for each in (sok.export(layer.table)[1], *head.get_weights())]


@pytest.mark.ranks
def test_two_runs_of_one_seed(on_processes):
    one, other = (on_processes(2, trained, run) for run in range(2))
    assert one == other


def test_tables_of_one_name_start_alike_and_of_two_names_do_not(sok):
    rows = [sok.EmbeddingVariable(5, name=n).find(KEYS)[0].numpy() for n in ("a", "a", "b")]
    assert (rows[0] == rows[1]).all()
    assert (rows[0] != rows[2]).all()


def test_layers_of_one_name_in_one_step_keep_apart(sok, on_threads):
    def check():
        layers = [layer_of("twin", rows) for rows in (1.0, 2.0)]

        @tf.function
        def both(keys):
            return [layer(keys, training=False) for layer in layers]

        found = both(tf.constant(KEYS[:5]))
        assert [np.unique(rows).tolist() for rows in found] == [[1.0], [2.0]]

    on_threads(2, check)


_PROGRAM = """
import hashlib, json, pathlib, sys, tempfile
import numpy as np, tensorflow as tf
threads = int(sys.argv[1])
tf.config.threading.set_intra_op_parallelism_threads(threads)
tf.config.threading.set_inter_op_parallelism_threads(threads)
import sok_like as sok
sok.Init(global_batch_size=512, seed=5)
digest, folder, sizes = hashlib.sha256(), tempfile.TemporaryDirectory(), []
for combiner in ("sum", "mean"):
    layer = sok.DistributedEmbedding(combiner, None, 19, 4, 8, name=combiner)
    optimizer = sok.tf.keras.optimizers.Adam(0.01)
    rng = np.random.default_rng(0)
    for step in range(4):
        # Enough keys for the work to be cut into parts, many of them repeated.
        keys = tf.constant(rng.zipf(1.2, [2048, 4, 8]) % 50_000)
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(layer(keys) * tf.constant(rng.random([2048, 4, 19]), tf.float32))
        variable = layer.embedding_variable
        gradient = tape.gradient(loss, variable)
        digest.update(gradient.values.numpy().tobytes())
        optimizer.apply_gradients([(gradient, variable)])
        if step in (1, 3):
            table = layer.table
            table.erase(np.unique(keys)[step::50])
            sok.Saver().dump(table, folder.name, since=None if step == 1 else "last")
    manifest = json.loads(pathlib.Path(folder.name, f"{combiner}.json").read_text())
    for dump in (manifest, *manifest["deltas"]):  # the files' bytes, by their SHA-256
        digest.update(dump["shards"][0]["checksum"].encode())
        sizes.append(dump["shards"][0]["keys"])
    for tensor in sok.export(variable):
        digest.update(tensor.numpy().tobytes())
print(json.dumps([digest.hexdigest(), int(layer.table.size()), sizes]))
"""


def test_number_of_threads():
    results = []
    for threads in (1, 2, 4) if os.environ.get("SLOW") else (1, 4):
        done = forks.run("-c", _PROGRAM, threads)
        assert done.returncode == 0, done.stderr[-3000:]
        results.append(json.loads(done.stdout))
    assert all(result == results[0] for result in results)
    assert results[0][1] > 1000
    base, delta = results[0][2][:2]
    assert 1000 < delta and 1000 < base
