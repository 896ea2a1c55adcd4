"""A folder that one job writes into, and another one that asks for it: two processes."""

import contextlib
import gc
import os
import signal

import numpy as np
import pytest
import tensorflow as tf

from sok_like.saving.format import folders


@pytest.fixture
def job(tmp_path):
    """`job()`: the number of a process that holds a folder, as does its child; None if refused."""
    started = []

    def start(folder=tmp_path):
        end, other_end = os.pipe()
        pid = os.fork()
        if pid == 0:
            try:
                lock = folders.lock(folder, "folder")
                child = os.fork()
                if child:
                    os.write(other_end, str(child).encode())
                signal.pause()
                del lock
            finally:
                os._exit(1)
        os.close(other_end)
        with open(end, "rb", buffering=0) as file:
            child = file.read(9)
        if not child:
            os.waitpid(pid, 0)
            return None
        started.extend([pid, int(child)])
        return pid

    yield start
    for pid in started:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def end(pid):
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)


def test_a_second_job_is_refused_until_the_first_has_ended(job, tmp_path):
    first = job()
    said = f"`backup_dir` must .*{tmp_path}', which process {first} \\(.*python.* "
    with pytest.raises(RuntimeError, match=said):
        folders.lock(tmp_path, "backup_dir")
    assert os.listdir(tmp_path) == []
    end(first)  # its child lives on
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
        with pytest.raises(RuntimeError, match=f"{tmp_path}', which process {holder}"):
            write(other, tmp_path)
    saver.dump(other, tmp_path / "another")
    end(holder)
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

    with pytest.raises(RuntimeError, match=f"`backup_dir` .*{tmp_path}.* process {held}"):
        fit()
    end(held)
    backup = fit()
    assert seen == [None]  # refused while `fit` ran
    assert job() is not None
    assert backup is not None
