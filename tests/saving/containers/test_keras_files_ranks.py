"""Keras' files, checkpoints and sessions of two ranks: all save and load, or none does."""

import contextlib
import os
import shutil
import signal
from unittest import mock

import numpy as np
import pytest
import tensorflow as tf

import sok_like as sok
import sok_like.dist_model_parallel as dmp
from sok_like import sok2
from sok_like.runtime.framework.running_keras import is_keras_3
from sok_like.runtime.ranks import comm
from sok_like.saving.format import array_files, shard_file
from tests.checks import files
from tests.checks.files import X, Y, called, check_same, everything, fit, made, mine

pytestmark = [pytest.mark.ranks, pytest.mark.keras]
KINDS = ("weights", "checkpoint")


def raises(words):
    return pytest.raises(Exception, match=f"(?s){words}")


def trained(seed):
    """A model with every kind of state."""
    model = made(whole=True)
    fit(model, 1, seed)
    return model


def paths_of_their_own(folder):
    model, mine = trained(0), str(folder / f"own{sok.rank()}")
    backup = tf.keras.callbacks.BackupAndRestore(mine)
    for call in (
        lambda: model.save_weights(f"{mine}.weights.h5"),
        lambda: model.save(f"{mine}.keras"),
        lambda: tf.train.Checkpoint(model=model).write(mine),
        lambda: fit(called(), 2, callbacks=[backup]),
    ):
        with raises("All ranks must save to the same path.*MetricAverage"):
            call()


def disks_of_their_own(folder):
    """A relative path in two working directories: neither has what the other rank writes."""
    (folder / str(sok.rank())).mkdir()
    layer = dmp.DistributedEmbedding([tf.keras.layers.Embedding(20, 4) for _ in range(2)])
    layer.build()
    static = sok2.Variable(np.ones([6, 2], np.float32), mode="localized:0")
    with pytest.MonkeyPatch.context() as patched:
        patched.chdir(folder / str(sok.rank()))
        for call in (
            lambda: tf.train.Checkpoint(layer=layer).write("dense"),
            lambda: called().save_weights("w.weights.h5"),
            lambda: tf.train.Checkpoint(v=static).write("own"),
        ):
            with raises("must be on a file system that all ranks share"):
                call()
        assert not any(files for _, _, files in os.walk("."))


def copies_of_their_own(folder):
    """Each rank alone writes a file of the same relative path, and then all read it."""
    rank = sok.rank()
    mine = folder / str(rank)
    with files.world(1):
        model = made()
        fit(model, 1, rank)
        files.write(model, mine, KINDS)
    model = called()
    before = everything(model)
    with pytest.MonkeyPatch.context() as patched:
        patched.chdir(mine)
        for kind in KINDS:
            with raises("All ranks must read the same file"):
                files.load(kind, model, mine.relative_to(mine))
    check_same(everything(model), before)


def rank_1_fails(folder):
    """It cannot write, or cannot read: all raise, and what was stays."""
    model = trained(0)
    files.write(model, folder, KINDS)
    before = everything(model)
    fit(model, 1, 30)
    full = OSError(28, "No space left on device", "here")
    for module, name in ((shard_file, "write_shard"), (array_files, "write")):
        patched = mock.patch.object(module, name, side_effect=full)
        for kind in KINDS:
            with patched if sok.rank() else contextlib.nullcontext(), raises("rank 1: .*No space"):
                files.write(model, folder, [kind])
    after = everything(model)
    missing = folder / f"missing{sok.rank()}" if sok.rank() else folder
    with raises("rank 1: FileNotFoundError"):
        files.load("weights", model, missing)
    (dense,) = folder.glob("w.weights.h5.tables/*dense*/1-of-2.npz")
    with files.on_rank(1, moved(dense)):
        with raises("must lie beside the file that is read.*1-of-2.npz"):
            files.load("weights", model, folder)
    with optimizer_fails(model), raises("rank 1: .*the disk is ill"):
        files.load("weights", model, folder)  # after the layers
    check_same(everything(model), after)
    for kind in KINDS:
        fit(model, 1, 30)
        files.load(kind, model, folder)
        check_same(everything(model), before, kind)


@contextlib.contextmanager
def moved(path):
    os.rename(path, f"{path}.away")
    yield
    os.rename(f"{path}.away", path)


@contextlib.contextmanager
def optimizer_fails(model):
    """The optimizer of rank 1 cannot be read."""
    optimizer = type(model.optimizer)
    cls = next(each for each in optimizer.__mro__ if "load_own_variables" in vars(each))
    own = cls.load_own_variables

    def fail(self, store):
        own(self, store)
        if sok.rank() == 1:
            raise OSError(5, "the disk is ill")

    with mock.patch.object(cls, "load_own_variables", fail):
        yield


def damaged_bytes(folder):
    """A byte of each kind of file: it raises on all ranks, and all of it is kept."""
    model, other = trained(0), trained(5)
    files.write(model, folder, KINDS)
    before, written = everything(other), everything(model)

    def check(kind, path, at, words=None):
        named = str(path) if words is None else words
        with files.on_rank(0, files.flipped(path, at)), raises(named):
            files.load(kind, other, folder)
        check_same(everything(other), before, path)

    for kind, name in zip(KINDS, ("w.weights.h5", "c"), strict=True):
        tables = folder / f"{name}.tables"
        for path in (*tables.glob("*dense*/1-of-2.npz"), *tables.glob("files_one*/*.1-of-2.npz")):
            check(kind, path, path.stat().st_size // 2)
    data = folder / "c.data-00000-of-00001"
    kernel = np.asarray(model.layers[-1].kernel).tobytes()
    at = data.read_bytes().index(kernel) + 5
    check("checkpoint", data, at, "")
    with files.world(1) as group:
        if group is not None:
            alone = trained(7)
            of_alone = everything(alone)
            with files.flipped(data, at), raises(""):
                files.load("checkpoint", alone, folder)
            check_same(everything(alone), of_alone)
    for kind in KINDS:
        fit(other, 1, 30)
        files.load(kind, other, folder)
        check_same(everything(other), written, kind)


def schemes(folder):
    """Paths with a scheme: of a file system that all ranks see, and of none."""
    model, here = trained(3), sorted(os.listdir())
    written, checkpoint = everything(model), tf.train.Checkpoint(model=model)
    ways = {"c": (checkpoint.write, checkpoint.read)}
    if is_keras_3():  # tf_keras writes HDF5 files to local disks only
        ways["w.weights.h5"] = (model.save_weights, model.load_weights)
    for name, (save, read) in ways.items():
        save(f"file://{folder}/{name}")
        fit(model, 1)
        read(f"file://{folder}/{name}")
        check_same(everything(model), written, name)
        with raises("nowhere"):
            save(f"nowhere://bucket/{name}")
        assert (folder / f"{name}.tables").is_dir()
    assert sorted(os.listdir()) == here


def dense_layer(sizes):
    keys = [tf.keras.Input([2], dtype="int64") for _ in sizes]
    layer = dmp.DistributedEmbedding([tf.keras.layers.Embedding(n, 4) for n in sizes])
    return tf.keras.Model(keys, layer(keys)), layer


def other_files(folder):
    """HDF5 alone, `overwrite`, and a table of another shape, which one rank holds."""
    model, layer = dense_layer([20, 7])
    # Keras 3 has no such files of weights.
    for call in (model.save, *([] if is_keras_3() else [model.save_weights, model.load_weights])):
        with raises("ends in '.weights.h5'"):
            call(str(folder / "dense.h5"))
    assert not (folder / "dense.h5").exists()
    model.save(str(folder / "once.keras"), overwrite=False)
    with raises("`overwrite=False` the file must not exist"):
        model.save(str(folder / "once.keras"), overwrite=False)
    model.save_weights(str(folder / "w.weights.h5"))
    other, layer = dense_layer([20, 8])
    before = layer.get_weights(all_ranks=True)
    other.load_weights(str(folder / "w.weights.h5"), skip_mismatch=True)
    assert all(map(np.array_equal, layer.get_weights(all_ranks=True), before))


@pytest.mark.keras(slow=True)
@pytest.mark.parametrize(
    "scene",
    [
        *(paths_of_their_own, disks_of_their_own, copies_of_their_own, rank_1_fails),
        *(damaged_bytes, schemes, other_files),
    ],
)
def test_all_or_none(on_processes, tmp_path, scene):
    on_processes(2, scene, tmp_path)


class Interrupt(tf.keras.callbacks.Callback):
    def on_epoch_begin(self, epoch, logs=None):
        if epoch == 2:
            raise files.Interrupted


def backup(folder):
    """Keras' own BackupAndRestore over a shared folder: the bits of a run without interruption."""

    def go_on(model, *others):
        keras = tf.keras.callbacks.BackupAndRestore(str(folder / "backup"))
        return len(fit(model, 4, callbacks=[keras, *others]).history["loss"])

    with contextlib.suppress(files.Interrupted):
        go_on(called(), Interrupt())
    model = called()
    assert go_on(model) == 2
    np.testing.assert_array_equal(model.predict_on_batch(X), unbroken())
    comm.current().barrier()
    assert not any((folder / "backup").glob("*"))


def unbroken():
    model = called()
    fit(model, 4)
    return model.predict_on_batch(X)


def test_keras_backup_in_a_shared_folder(on_processes, tmp_path):
    on_processes(2, backup, tmp_path)


class Preempt(tf.keras.callbacks.Callback):
    """A SIGTERM to rank 1 alone, in the second epoch."""

    def on_epoch_begin(self, epoch, logs=None):
        if epoch == 1 and sok.rank() == 1:
            os.kill(os.getpid(), signal.SIGTERM)


def preempted(folder):
    """`sok.callbacks.BackupAndRestore` saves at a SIGTERM."""
    before = signal.getsignal(signal.SIGTERM)
    callback = sok.callbacks.BackupAndRestore(str(folder), sigterm_every=1)
    with pytest.raises(SystemExit) as end:
        fit(called(), 4, callbacks=[Preempt(), callback])
    assert end.value.code == 143 and signal.getsignal(signal.SIGTERM) == before


def go_on_after(folder):
    model, callback = called(), sok.callbacks.BackupAndRestore(str(folder))
    assert len(fit(model, 4, callbacks=[callback]).history["loss"]) == 2
    assert int(tf.convert_to_tensor(model.optimizer.iterations)) == 4
    return model.predict_on_batch(X)


@pytest.mark.slow
@pytest.mark.parametrize("readers", [1, 2])
def test_a_sigterm_saves_and_any_number_of_ranks_goes_on(on_processes, tmp_path, readers):
    on_processes(2, preempted, tmp_path / "b")
    (expected,) = on_processes(1, unbroken)
    copy = shutil.copytree(tmp_path / "b", tmp_path / "copy")  # the ranks still have the first
    for predicted in on_processes(readers, go_on_after, copy):
        np.testing.assert_allclose(predicted, expected, rtol=0, atol=1e-6)
    assert not copy.exists()


def session_variables():
    v1 = tf.compat.v1
    table = sok.EmbeddingVariable(4, name="in_session")
    weights = v1.get_variable("w", initializer=np.ones([8, 1], np.float32), use_resource=True)
    return table, weights, v1.train.get_or_create_global_step()


def train_session(folder, stop, **options):
    """The first step of a MonitoredTrainingSession, and the content of its last checkpoint."""
    v1 = tf.compat.v1
    with tf.Graph().as_default():
        v1.set_random_seed(3)
        table, weights, step = session_variables()
        rows = tf.gather(table, tf.constant(mine(X)))
        error = tf.matmul(tf.reshape(rows, [-1, 8]), weights) - tf.constant(mine(Y))
        optimizer = sok.OptimizerWrapper(v1.train.AdamOptimizer(0.05))
        train = optimizer.minimize(tf.reduce_mean(error**2), global_step=step)
        found = table.snapshot()
        content = [found.keys, found.rows, found.slot_rows, weights.read_value(), step]
        folder.mkdir(parents=True, exist_ok=True)
        options |= {"log_step_count_steps": None, "save_summaries_steps": None}
        options |= {"hooks": [v1.train.StopAtStepHook(last_step=stop)]}
        with v1.train.MonitoredTrainingSession(checkpoint_dir=str(folder), **options) as running:
            first = int(running.run(step))
            while not running.should_stop():
                running.run(train)
        with v1.Session() as again:
            v1.train.Saver().restore(again, tf.train.latest_checkpoint(str(folder)))
            return first, again.run(content)


def sessions(folder):
    """One by time, in one go; one by steps, which goes on from its checkpoint."""
    # Rank 1's clock is so slow that by itself it would never save.
    seconds = 6000 if sok.rank() else 1e-3
    first, unbroken = train_session(folder / "by_time", 5, save_checkpoint_secs=seconds)
    paths = tf.train.get_checkpoint_state(str(folder / "by_time")).all_model_checkpoint_paths
    assert first == 0 and [path.rpartition("-")[2] for path in paths] == list("12345")
    comm.current().barrier()  # another rank may still remove
    tables = sorted(path.name for path in (folder / "by_time").glob("*.tables"))
    assert tables == [f"model.ckpt-{number}.tables" for number in range(1, 6)]
    assert len(unbroken[0]) == 12 and np.abs(unbroken[2]).max() > 0 and unbroken[-1] == 5
    train_session(folder / "by_steps", 3, save_checkpoint_steps=2)
    first, resumed = train_session(folder / "by_steps", 5, save_checkpoint_steps=2)
    assert first == 3
    for found, expected in zip(resumed, unbroken, strict=True):
        np.testing.assert_array_equal(found, expected)
    comm.current().barrier()  # another rank may still write
    (dump,) = (folder / "by_steps" / "model.ckpt-5.tables").iterdir()
    table = sok.EmbeddingVariable(4, name="in_session")
    sok.Saver().restore_from_file(table, dump)  # it is a dump as any other
    np.testing.assert_array_equal(sok.export(table)[0], unbroken[0])
    with raises("All ranks must read the same file"):
        restore_a_copy_of_one_s_own(folder)


def restore_a_copy_of_one_s_own(folder):
    """The same tables on each rank, and other ordinary variables."""
    path = str(shutil.copytree(folder / "by_steps", folder / str(sok.rank())) / "model.ckpt-5")
    content = tf.train.load_checkpoint(path)
    tensors = {name: content.get_tensor(name) for name in content.get_variable_to_shape_map()}
    tensors["w"] += np.float32(sok.rank())
    names, everything = list(tensors), [""] * len(tensors)
    tf.raw_ops.SaveV2(
        prefix=path, tensor_names=names, shape_and_slices=everything, tensors=[*tensors.values()]
    )
    with tf.Graph().as_default(), tf.compat.v1.Session() as running:
        session_variables()
        tf.compat.v1.train.Saver().restore(running, path)


@pytest.mark.keras(slow=True)
def test_a_monitored_session_resumes_keys_slots_and_step(on_processes, tmp_path):
    on_processes(2, sessions, tmp_path)
