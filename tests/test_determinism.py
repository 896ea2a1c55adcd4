"""The same bits on any number of ranks, in any order of arrival, with any number of threads."""

import json
import os
import subprocess
import sys

import numpy as np
import pytest

from tests.checks import parity, shards

each_world = pytest.mark.parametrize(
    "world_size", [1, *(pytest.param(n, marks=pytest.mark.ranks) for n in (2, 3))]
)


@each_world
@pytest.mark.parametrize("initializer", shards.INITIALIZERS)
def test_initial_rows(rank_results, world_size, initializer):
    alone = rank_results(1, "shards.initial_rows")[0][initializer]["read"]
    exported = {}
    for result in rank_results(world_size, "shards.initial_rows"):
        rows = result[initializer]
        assert rows["read"].tobytes() == alone.tobytes()
        assert rows["after"].tobytes() == alone.tobytes()
        exported.update(zip(rows["exported"][0].tolist(), rows["exported"][1], strict=True))
    assert set(exported) == set(shards.KEYS.tolist())
    for key, row in zip(shards.KEYS.tolist(), alone, strict=True):
        assert exported[key].tobytes() == row.tobytes()


@pytest.mark.ranks
def test_rows_of_16_bits(rank_results):
    ranks = rank_results(2, "shards.rows_of_16_bits")
    for dtype, alone in shards.rows_of_16_bits().items():
        together = {key: row for rank in ranks for key, row in rank[dtype].items()}
        assert len(together) == len(shards.KEYS)
        assert together == alone
        for row in together.values():
            values = np.array(row, np.float32)
            np.testing.assert_array_equal(values, values.astype(shards.ROW_DTYPES[dtype]))


@pytest.mark.parametrize("world_size", [1, pytest.param(2, marks=pytest.mark.ranks)])
def test_two_runs_of_one_seed(rank_results, world_size):
    first = rank_results(world_size, "parity." + ".".join(parity.TWICE))
    second = rank_results(world_size, "shards.train_again")
    for one, other in zip(first, second, strict=True):
        for table, (_, rows) in one["export"].items():
            assert rows.tobytes() == other["export"][table][1].tobytes()
        for table, weights in one["heads"].items():
            others = other["heads"][table]
            assert [w.tobytes() for w in weights] == [w.tobytes() for w in others]


def test_tables_of_one_name_start_alike_and_of_two_names_do_not(sok):
    rows = [sok.EmbeddingVariable(5, name=n).find(shards.KEYS)[0].numpy() for n in ("a", "a", "b")]
    assert (rows[0] == rows[1]).all()
    assert (rows[0] != rows[2]).all()


@each_world
def test_layers_of_one_name_in_one_step_keep_apart(rank_results, world_size):
    for found in rank_results(world_size, "shards.tables_of_one_name"):
        assert [np.unique(rows).tolist() for rows in found] == [[1.0], [2.0]]


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
        done = subprocess.run(
            [sys.executable, "-c", _PROGRAM, str(threads)], capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr[-3000:]
        results.append(json.loads(done.stdout))
    assert all(result == results[0] for result in results)
    assert results[0][1] > 1000
    base, delta = results[0][2][:2]
    assert 1000 < delta and 1000 < base
