"""A job whose ranks are killed: `sok_like.run --restarts` and `BackupAndRestore` together."""

import itertools
import json
import os
import signal
import subprocess
import sys

import numpy as np
import pytest

from tests.ranks import HANG_LIMIT, ROOT, ending_with_this_process

# Writes each batch's number and loss; kills a rank behind some batches, each of them once.
PROGRAM = """
import json, os, pathlib, signal, sys
import numpy as np, tensorflow as tf
import sok_like as sok

folder, deaths = pathlib.Path(sys.argv[1]), json.loads(sys.argv[2])
sok.Init(global_batch_size=12, seed=7)
tf.keras.utils.set_random_seed(7)
keys = np.random.default_rng(0).integers(0, 50, [120, 2])
labels = np.cos(keys.sum(1, keepdims=True)).astype("float32")
inputs = tf.keras.Input([2], dtype="int64")
rows = sok.GroupEmbedding({"a": 4}, combiners="sum")({"a": inputs})["a"]
model = tf.keras.Model(inputs, tf.keras.layers.Dense(1)(rows))
model.compile(sok.OptimizerWrapper(tf.keras.optimizers.Adagrad(0.1)), "mse")
data = tf.data.Dataset.from_tensor_slices((keys, labels))
data = sok.shard(data, drop_remainder=True).batch(12 // sok.size())


class Watch(tf.keras.callbacks.Callback):
    def on_epoch_begin(self, epoch, logs=None):
        self.epoch = epoch

    def on_train_batch_end(self, batch, logs=None):
        number = self.epoch * 10 + batch
        loss = float(np.square(model.predict_on_batch(keys) - labels).mean())
        if sok.rank() == 0:
            with open(folder / "losses", "a") as file:
                print(json.dumps([number, loss, sok.size()]), file=file)
        died = folder / f"died{number}"
        if number in deaths and not died.exists() and sok.rank() == sok.size() - 1:
            died.touch()
            os.kill(os.getpid(), signal.SIGKILL)


backup = sok.callbacks.BackupAndRestore(str(folder / "backup"), save_freq=3)
model.fit(data, epochs=3, verbose=0, callbacks=[backup, Watch()])
"""
DEATHS = [4, 13, 26]


def run(tmp_path, name, words, deaths):
    folder = tmp_path / name
    folder.mkdir()
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    code = "import sys; from sok_like import run; run._AT_ONCE = 0; run.main(sys.argv[1:])"
    line = [sys.executable, "-c", code, *words, str(program), str(folder), json.dumps(deaths)]
    done = subprocess.run(
        ending_with_this_process(line),
        cwd=ROOT,
        env={**os.environ, "TF_CPP_MIN_LOG_LEVEL": "2", "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=HANG_LIMIT,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stderr.count(f"status {128 + signal.SIGKILL}") == len(deaths)
    assert "a second time" not in done.stderr
    return [json.loads(line) for line in (folder / "losses").read_text().splitlines()]


def check(found, expected, deaths):
    """Losses of all batches, of which an interval at most was trained again after each death."""
    numbers = [number for number, *_ in found]
    assert sorted(set(numbers)) == list(range(30))
    again = [(b, a) for b, a in itertools.pairwise(numbers) if a != b + 1]
    # Rank 0 may be ended before it has written the loss of the batch behind which a rank died.
    assert len(again) <= len(deaths) and all(b - 3 < a <= b for b, a in again)
    wanted = {number: loss for number, loss, _ in expected}
    for number, loss, _ in found:
        np.testing.assert_allclose(loss, wanted[number], rtol=0, atol=1e-6)


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory):
    return run(tmp_path_factory.mktemp("unbroken"), "one", ["-np", "1"], [])


@pytest.mark.ranks
@pytest.mark.keras(slow=True)
def test_a_killed_rank_costs_one_interval_and_a_rank(tmp_path, unbroken):
    words = ["-np", "2", "--restarts", "1", "--min-np", "1"]
    found = run(tmp_path, "two", words, DEATHS[1:2])
    check(found, unbroken, DEATHS[1:2])
    sizes = [size for _, _, size in found]
    assert sizes == sorted(sizes, reverse=True) and sizes.count(2) in (13, 14)


@pytest.mark.ranks
@pytest.mark.slow  # with SLOW=1, as `make test-all` sets it
def test_ranks_that_are_killed_three_times_have_the_losses_of_an_unbroken_run(tmp_path, unbroken):
    found = run(tmp_path, "two", ["-np", "2", "--restarts", "3"], DEATHS)
    check(found, unbroken, DEATHS)
    assert len(found) > 30
