"""A job whose ranks are killed: `sok_like.run --restarts` and `BackupAndRestore` together."""

import itertools
import json
import os
import pathlib
import signal
import subprocess
import sys
import time

import numpy as np
import pytest

from tests import forks
from tests.ranks import HANG_LIMIT, ROOT, ending_with_this_process

# Writes each batch's number and loss, and its process.
PROGRAM = """
import json, os, pathlib, sys
import numpy as np, tensorflow as tf
import sok_like as sok

folder = pathlib.Path(sys.argv[1])
(folder / f"pid{os.getpid()}").touch()
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


backup = sok.callbacks.BackupAndRestore(str(folder / "backup"), save_freq=3, sigterm_every=2)
model.fit(data, epochs=3, verbose=0, callbacks=[Watch(), backup])
"""
TWICE = [("launcher", signal.SIGTERM), ("rank", signal.SIGKILL)]
TEN_TIMES = [
    *[("rank", number) for number in (signal.SIGTERM, signal.SIGSTOP, signal.SIGKILL) * 2],
    *[("launcher", signal.SIGKILL), ("rank", signal.SIGSTOP), *TWICE],
]


def started(folder, words, **environment):
    (folder / "program.py").write_text(PROGRAM)
    code = "import sys; from sok_like import run; run._AT_ONCE = 0; run.main(sys.argv[1:])"
    program = forks.command(folder / "program.py", folder)
    line = [*words, *program[1:]]  # which begins with TensorFlow loaded
    known = {"TF_CPP_MIN_LOG_LEVEL": "2", "PYTHONPATH": str(ROOT), **environment}
    return subprocess.Popen(
        ending_with_this_process([sys.executable, "-c", code, *line]),
        cwd=ROOT,
        env={**os.environ, **known},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def losses(folder):
    path = folder / "losses"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def check(found, expected, signals):
    """Losses of all batches, of which an interval at most was trained again after each signal."""
    numbers = [number for number, *_ in found]
    assert sorted(set(numbers)) == list(range(30))
    again = [(b, a) for b, a in itertools.pairwise(numbers) if a != b + 1]
    # Rank 0 may be ended before it has written the loss of the batch behind which a rank died, and
    # behind a loss before the backup of its batch.
    assert len(again) <= len(signals) and all(b - 3 < a <= b for b, a in again)
    wanted = {number: loss for number, loss, _ in expected}
    for number, loss, _ in found:
        np.testing.assert_allclose(loss, wanted[number], rtol=0, atol=1e-6)


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory):
    folder = tmp_path_factory.mktemp("unbroken")
    job = started(folder, ["-np", "1"])
    output = job.communicate(timeout=HANG_LIMIT)[0]
    assert job.returncode == 0, output[-3000:]
    return losses(folder)


def living(folder):
    """The processes that are ranks of this job."""
    pids = [int(path.name[3:]) for path in folder.glob("pid*")]
    return [pid for pid in pids if pathlib.Path(f"/proc/{pid}/cwd").exists()]


@pytest.mark.ranks
@pytest.mark.keras(slow=True)
@pytest.mark.parametrize(
    "least, signals", [(1, TWICE), pytest.param(2, TEN_TIMES, marks=pytest.mark.slow)]
)
def test_signals_at_random_moments_change_no_loss(tmp_path, unbroken, least, signals):
    folder, random = tmp_path / "job", np.random.default_rng(len(signals))
    folder.mkdir()
    until = time.monotonic() + (1 + len(signals)) * HANG_LIMIT / 2

    def start():
        limit = str(HANG_LIMIT // 40)  # of a wait for a stopped rank
        words = ["-np", "2", "--restarts", "10", "--min-np", str(least)]
        return started(folder, words, SOK_STALL_TIMEOUT=limit)

    def wait_for(holds):
        while not holds():
            assert time.monotonic() < until, losses(folder)[-1:]
            assert job.poll() is None, job.stdout.read()[-3000:]
            time.sleep(0.01)

    job = start()
    for number, (whom, sent) in enumerate(signals):
        # Some come while ranks start, some in a batch, some in a backup.
        wanted = (24 * number + int(random.integers(1, 24))) // len(signals)
        # In `fit`: a program that has just begun ends without a backup, and nothing ends one that
        # waits in `sok.Init` for a stopped rank.
        if whom == "launcher" or sent == signal.SIGSTOP:
            wanted = max(wanted, len(losses(folder)) + 1)
        wait_for(lambda wanted=wanted: len(losses(folder)) >= wanted and living(folder))
        time.sleep(random.uniform(0, 0.3))
        before = living(folder)
        if whom == "rank":
            os.kill(int(random.choice(before)), sent)
            wait_for(lambda before=before: not set(before) & set(living(folder)))
            continue
        os.kill(job.pid, sent)
        output = job.communicate(timeout=HANG_LIMIT)[0]  # all who could write to it have ended
        assert job.returncode == {signal.SIGTERM: 143, signal.SIGKILL: -9}[sent], output[-3000:]
        assert "saved to" in output or sent == signal.SIGKILL
        while living(folder):  # closed its files, and is about to end
            assert time.monotonic() < until
        job = start()  # at once, in the same folder
    output = job.communicate(timeout=HANG_LIMIT)[0]
    assert job.returncode == 0, output[-3000:]
    check(losses(folder), unbroken, signals)
    assert {size for *_, size in losses(folder)} == {2, least}
    assert living(folder) == []
