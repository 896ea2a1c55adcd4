"""Every kind of state in one save: all of it is kept, or all ranks raise and change nothing."""

import contextlib
import os

import numpy as np
import tensorflow as tf

from tests.checks.files import message_of, shared, tables_of, world

ROWS, BATCH = (20, 7), 12


def checks(world_size):
    if world_size > 2:
        return {}
    # The last one names layers of one rank alone, after which the ranks' names differ.
    on_two = {"unshared": unshared, "schemes": schemes, "damaged": damaged}
    return {"old": old, **(on_two if world_size == 2 else {})}


def made(seed):
    """Two layers of dense tables, one of them with a hash table, and a stock layer; trained."""
    import sok_like as sok
    import sok_like.dist_model_parallel as dmp
    from sok_like.runtime.ranks import comm

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
    from sok_like.table.variable import is_embedding_variable

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
    from sok_like.runtime.ranks import comm

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
    from sok_like import sok2
    from sok_like.runtime.ranks import comm

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
    from sok_like.runtime.ranks import comm

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
    from sok_like.runtime.ranks import comm

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
    import sok_like as sok
    from tests.saving import old_files

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
