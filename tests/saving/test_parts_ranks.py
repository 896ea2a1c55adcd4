"""All kinds of state in one file of two ranks; the ranks' part is in checks/parts.py."""

import contextlib
import os

import numpy as np
import pytest
import tensorflow as tf

import sok_like as sok
from sok_like import sok2
from sok_like.runtime.framework.running_keras import is_keras_3
from sok_like.runtime.ranks import comm
from sok_like.table.variable import is_embedding_variable
from tests.checks.files import message_of, shared, tables_of, world
from tests.saving import old_files

pytestmark = [pytest.mark.ranks, pytest.mark.keras]

ROWS, BATCH = (20, 7), 12


def made(seed):
    """Two layers of dense tables, one of them with a hash table, and a stock layer; trained."""
    import sok_like.dist_model_parallel as dmp

    tf.keras.utils.set_random_seed(seed)
    keys = [tf.keras.Input([2], dtype="int64") for _ in ROWS]
    first = dmp.DistributedEmbedding(
        [tf.keras.layers.Embedding(ROWS[0], 4), sok.HashEmbedding(4, combiner="sum")]
    )(keys)
    second = dmp.DistributedEmbedding([tf.keras.layers.Embedding(n, 4) for n in ROWS])(keys)
    flat = [tf.keras.layers.Flatten()(each) for each in (*first, *second)]
    both = tf.keras.layers.Concatenate()(flat)
    start = tf.keras.initializers.GlorotUniform(seed)  # ranks draw tables of their own before
    model = tf.keras.Model(keys, tf.keras.layers.Dense(1, kernel_initializer=start)(both))
    optimizer = sok.OptimizerWrapper(tf.keras.optimizers.Adam(0.1))
    model.compile(optimizer, "mse", run_eagerly=True)
    count = BATCH // comm.current().world_size
    mine = np.arange(count) + count * comm.current().rank
    batch = [np.stack([mine, mine + seed], 1) % n for n in ROWS]
    for _ in range(2):
        model.train_on_batch(batch, mine[:, np.newaxis].astype(np.float32))
    return model


def state(model):
    """Everything that this rank holds."""
    optimizer = model.optimizer
    known = optimizer.variables
    variables = [*model.variables, *(known() if callable(known) else known)]
    found = [np.asarray(each) for each in variables if not is_embedding_variable(each)]
    for table in tables_of(model):
        found += map(np.asarray, table.snapshot().fields().values())
    return found


def same(one, other):
    return len(one) == len(other) and all(map(np.array_equal, one, other))


@contextlib.contextmanager
def on_rank_0(function):
    """Ranks go on when rank 0 has called it."""
    comm.current().barrier()
    undo = function() if comm.current().rank == 0 else None
    comm.current().barrier()
    yield
    comm.current().barrier()
    if undo is not None:
        undo()
    comm.current().barrier()


def flipped(path, at):
    """Flips a byte; returns what flips it back."""
    with open(path, "r+b") as file:
        file.seek(at)
        byte = file.read(1)[0]
        file.seek(at)
        file.write(bytes([byte ^ 0x10]))
    return lambda: flipped(path, at)


def unshared():
    """A relative path in two working directories: neither has what the other rank writes."""
    import sok_like.dist_model_parallel as dmp

    own, here = shared(f"unshared{comm.current().rank}"), os.getcwd()
    own.mkdir(parents=True)
    layer = dmp.DistributedEmbedding([tf.keras.layers.Embedding(n, 4) for n in ROWS])
    keys = [tf.keras.Input([2], dtype="int64") for _ in ROWS]
    model = tf.keras.Model(keys, layer(keys))
    static = sok2.Variable(np.ones([6, 2], np.float32), mode="localized:0")
    os.chdir(own)
    try:
        return {
            "dense": message_of(tf.train.Checkpoint(layer=layer).write, "dense"),
            "weights": message_of(model.save_weights, "w.weights.h5"),
            "sok2": message_of(tf.train.Checkpoint(v=static).write, "own"),
            "left": sorted(str(path) for path in own.rglob("*") if path.is_file()),
        }
    finally:
        os.chdir(here)


def damaged():
    """A byte of each kind of file; what raises on all ranks, and whether all of it is kept."""
    folder = shared("damaged")
    model, other = made(3), made(5)
    prefix, weights = str(folder / "c"), str(folder / "w.weights.h5")
    folder.mkdir(parents=True, exist_ok=True)
    tf.train.Checkpoint(model=model).write(prefix)
    model.save_weights(weights)
    before, written = state(other), state(model)
    loads = {
        prefix: lambda: tf.train.Checkpoint(model=other).read(prefix),
        weights: lambda: other.load_weights(weights),
    }
    kernel = np.asarray(model.layers[-1].kernel).tobytes()
    data = f"{prefix}.data-00000-of-00001"
    with open(data, "rb") as file:
        in_data = file.read().index(kernel)
    found = {}

    def check(name, file, at, path):
        with on_rank_0(lambda: flipped(file, at)):
            found[name] = str(file), message_of(loads[path]), same(before, state(other))

    for path in loads:
        # The layer that is read last.
        *_, file = sorted((folder / f"{os.path.basename(path)}.tables").glob("dense*/1-of-2.npz"))
        size = file.stat().st_size
        for at in (40, size // 2, size - 30):
            check(f"{os.path.basename(path)} {at}", file, at, path)
    check("data", data, in_data + 5, prefix)
    with world(1) as group:
        if group is not None:
            alone = made(7)
            alone_before = state(alone)
            undo = flipped(data, in_data + 5)
            message = message_of(tf.train.Checkpoint(model=alone).read, prefix)
            found["alone"] = data, message, same(alone_before, state(alone))
            undo()
    found["optimizer"] = ("optimizer", *optimizer_fails(other, loads[weights], before))
    comm.current().barrier()
    for load in loads.values():
        load()
        found.setdefault("loaded", []).append(same(written, state(other)))
    return found


def optimizer_fails(model, load, before):
    """The optimizer of rank 1 cannot be read, after the layers."""
    optimizer = model.optimizer
    cls = next(each for each in type(optimizer).__mro__ if "load_own_variables" in vars(each))
    own = cls.load_own_variables

    def fail(self, store):
        own(self, store)
        if comm.current().rank == 1:
            raise OSError(5, "the disk is ill")

    cls.load_own_variables = fail
    try:
        return message_of(load), same(before, state(model))
    finally:
        cls.load_own_variables = own


def schemes():
    """Paths with a scheme: of a file system that all ranks see, and of none."""
    folder, here = shared("schemes"), set(os.listdir())
    folder.mkdir(parents=True, exist_ok=True)
    model = made(3)
    written, found = state(model), {}
    ways = {"c": (tf.train.Checkpoint(model=model).write, tf.train.Checkpoint(model=model).read)}
    if hasattr(tf.keras, "version"):  # tf_keras writes HDF5 files to local disks only
        ways["w.weights.h5"] = (model.save_weights, model.load_weights)
    for name, (write, read) in ways.items():
        path = f"file://{folder}/{name}"
        write(path)
        model.layers[-1].kernel.assign_add(tf.ones_like(model.layers[-1].kernel))
        tables_of(model)[0].clear()
        read(path)
        unknown = message_of(write, f"nowhere://bucket/{name}")
        found[name] = (folder / f"{name}.tables").is_dir(), same(written, state(model)), unknown
    return {"ways": found, "here": set(os.listdir()) - here}


def old():
    """Files of version 0.1, which two ranks have written."""
    folder, expected, found = old_files.FOLDER, old_files.state(old_files.made(1.0)), []
    if hasattr(tf.keras, "version"):  # Keras 3 has written it; tf_keras names a model's parts apart
        for read in (
            lambda model: tf.train.Checkpoint(model=model).read(str(folder / "model")),
            lambda model: model.load_weights(str(folder / "model.weights.h5")),
        ):
            model = old_files.made(5.0)
            read(model)
            found.append(same(expected, old_files.state(model)))
    own = old_files.own(5.0)
    message = message_of(tf.train.Checkpoint(own=own).read, str(folder / "own"))
    read = message or bool((own.numpy() == 1 + sok.rank()).all())
    return {"same": found, "own": read}


def test_what_another_rank_does_not_see_is_not_saved(on_processes):
    for result in on_processes(2, unshared):
        for kind in ("dense", "weights", "sok2"):
            assert "must be on a file system that all ranks share" in result[kind], kind
        assert result["left"] == []


def test_one_damaged_byte_of_any_file_raises_on_all_ranks_and_changes_nothing(on_processes):
    for rank, result in enumerate(on_processes(2, damaged)):
        assert result.pop("loaded") == [True, True]
        assert len(result) == 8 + (rank == 0)
        for name, (file, message, kept) in result.items():
            assert message is not None and kept, (name, message, kept)
            assert file in message or name in ("data", "alone", "optimizer"), (name, message)


def test_a_path_may_have_a_scheme_that_all_ranks_see(on_processes):
    for result in on_processes(2, schemes):
        for beside, same, unknown in result["ways"].values():
            assert beside and same and "nowhere" in unknown
        assert result["here"] == set()


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_files_of_version_0_1_are_read(on_processes, num_ranks):
    for result in on_processes(num_ranks, old):
        assert result["same"] == ([True] * 2 if is_keras_3() else [])
        if num_ranks == 2:
            assert result["own"] is True
