"""A folder that one job writes into, and another one that asks for it: two processes."""

import gc
import os
import signal
import subprocess
import sys

import numpy as np
import pytest
import tensorflow as tf

from sok_like.saving.format import folders
from tests.ranks import ROOT

# Locks a folder and lives on, as does a child by `fork`. Or says that it cannot.
JOB = """
import os, sys, time
from sok_like.saving.format import folders
try:
    lock = folders.lock(sys.argv[1], "folder")
except RuntimeError:
    sys.exit("refused")
child = os.fork()
if child:
    print(child, flush=True)
time.sleep(600)
"""


@pytest.fixture
def job(tmp_path):
    """Starts a job that holds a folder, or is refused: then its child is None."""
    started, children = [], []

    def start(folder=tmp_path):
        line = [sys.executable, "-c", JOB, str(folder)]
        process = subprocess.Popen(line, cwd=ROOT, stdout=subprocess.PIPE, text=True)
        started.append(process)
        child = process.stdout.readline()
        children.extend([int(child)] if child else [])
        return process if child else None

    yield start
    for process in started:
        process.kill()
        process.wait()
        process.stdout.close()
    for child in children:
        os.kill(child, signal.SIGKILL)


def test_a_second_job_is_refused_until_the_first_has_ended(job, tmp_path):
    first = job()
    said = f"`backup_dir` must .*{tmp_path}', which process {first.pid} \\(.*python.* -c "
    with pytest.raises(RuntimeError, match=said):
        folders.lock(tmp_path, "backup_dir")
    assert os.listdir(tmp_path) == []
    first.kill()
    first.wait()  # its child lives on
    lock = folders.lock(tmp_path, "backup_dir")
    assert folders.lock(str(tmp_path), "backup_dir") is lock  # of this process, any number
    assert job() is None
    del lock
    assert job() is not None


def test_other_file_systems_have_no_locks(monkeypatch, tmp_path):
    assert folders.lock("memory://folder", "filepath") is None

    def refuse(*_):
        raise OSError(9, "no locks here")

    monkeypatch.setattr(folders.fcntl, "flock", refuse)
    assert folders.lock(tmp_path, "filepath") is None


def test_dumps_into_the_folder_of_a_living_job(sok, job, tmp_path):
    table = sok.EmbeddingVariable(2, name="users")
    sok.assign(table, [1, 2], tf.ones([2, 2]))
    saver = sok.Saver()
    saver.dump(table, tmp_path)
    assert job() is None  # the table may be dumped again
    sok.assign(table, [3], tf.ones([1, 2]))
    saver.dump(table, tmp_path, since="last")
    saver.begin_dump(table, tmp_path).finish()
    del table
    gc.collect()
    holder = job()
    assert holder is not None
    other = sok.EmbeddingVariable(2, name="users")
    saver.restore(other, tmp_path)  # readers are not refused
    assert int(other.size()) == 3
    for write in (saver.dump, saver.dump_to_file, saver.begin_dump):
        with pytest.raises(RuntimeError, match=f"{tmp_path}', which process {holder.pid}"):
            write(other, tmp_path)
    saver.dump(other, tmp_path / "another")
    holder.kill()
    holder.wait()
    saver.dump(other, tmp_path)


@pytest.mark.keras
def test_a_backup_of_a_living_job_is_not_shared(sok, job, tmp_path):
    model = tf.keras.Sequential([tf.keras.Input([1]), tf.keras.layers.Dense(1)])
    model.compile("sgd", "mse", jit_compile=False)
    held, seen = job(), []

    class Look(tf.keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            seen.append(job())

    def fit():
        backup = sok.callbacks.BackupAndRestore(tmp_path, delete_checkpoint=False)
        data = np.ones([4, 1], np.float32)
        model.fit(data, data, batch_size=4, verbose=0, callbacks=[backup, Look()])
        return backup

    with pytest.raises(RuntimeError, match=f"`backup_dir` .*{tmp_path}.* process {held.pid}"):
        fit()
    held.kill()
    held.wait()
    backup = fit()
    assert seen == [None]  # refused while `fit` ran
    assert job() is not None
    assert backup is not None
