"""Files that several ranks write together, and that other numbers of ranks read.

In one launch, ranks 0 to n-1 play a world of n ranks, by a communicator of their own.
"""

import contextlib
import os
import pathlib
import shutil
import signal
import tempfile
import traceback

import numpy as np
import tensorflow as tf

import sok_like as sok
from sok_like.runtime.ranks import comm
from sok_like.saving.format import shard_file
from sok_like.table.variable import is_embedding_variable, unwrap

BATCH = 12
X = np.arange(2 * BATCH).reshape(BATCH, 2)
Y = np.linspace(-1, 1, BATCH, dtype=np.float32)[:, np.newaxis]


def shared(name):
    # The ranks of a test run on one machine, under one launcher.
    return pathlib.Path(tempfile.gettempdir()) / f"sok_files_{os.getppid()}" / name


@contextlib.contextmanager
def world(ranks):
    """The first ranks as a world of their own; None for the others."""
    base = comm.current()
    others = [[rank] for rank in range(ranks, base.world_size)]
    group = base.subset([list(range(ranks)), *others])
    try:
        comm.set_current(group)
        yield group if base.rank < ranks else None
    except Exception:
        traceback.print_exc()  # of one rank alone it would not be seen: the others wait, and stall
        raise
    finally:
        comm.set_current(base)
        base.barrier()


def made():
    """A model with two tables, one of them with a filter, and an optimizer with state."""
    tf.keras.utils.set_random_seed(3)
    keys = tf.keras.Input([2], dtype="int64")
    layer = sok.DistributedEmbedding("sum", None, 4, slot_num=2, max_nnz=1, name="files_one")
    option = sok.EmbeddingVariableOption(filter_option=sok.CounterFilter(2))
    group = sok.GroupEmbedding(
        {"a": 4}, combiners="sum", name="files_group", table_options={"a": {"ev_option": option}}
    )
    both = [tf.keras.layers.Flatten()(layer(keys)), group({"a": keys})["a"]]
    dense = tf.keras.layers.Dense(1, name="dense_of_files")
    model = tf.keras.Model(keys, dense(tf.keras.layers.Concatenate()(both)))
    optimizer = sok.OptimizerWrapper(tf.keras.optimizers.Adam(0.05))
    model.compile(optimizer, "mse", run_eagerly=True)
    return model


def called():
    """The same with weights."""
    model = made()
    model(X[:1])
    return model


def fit(model, epochs, shift=0, **options):
    """On this rank's share of the batch."""
    count = BATCH // comm.current().world_size
    mine = slice(comm.current().rank * count, (comm.current().rank + 1) * count)
    x, y = X[mine] + shift, Y[mine]
    if options:
        return model.fit(x, y, batch_size=count, epochs=epochs, verbose=0, shuffle=False, **options)
    for _ in range(epochs):  # as `fit` does, whose pipelines take longer than the steps
        model.train_on_batch(x, y)
    return None


def tables_of(model):
    return [unwrap(each) for each in model.variables if is_embedding_variable(each)]


def state(model):
    """Keys, rows, slot rows and records of this rank, by table."""
    found = {}
    for table in tables_of(model):
        snapshot = table.snapshot().fields()
        found[table.table_name] = {name: np.asarray(value) for name, value in snapshot.items()}
    return found


def write_all(model, folder):
    folder.mkdir(parents=True, exist_ok=True)
    model.save(str(folder / "m.keras"))
    model.save_weights(str(folder / "w.weights.h5"))
    manager = tf.train.CheckpointManager(tf.train.Checkpoint(model=model), str(folder / "c"), 2)
    for _ in range(3):
        manager.save()


def read(kind, folder):
    if kind == "model":
        model = tf.keras.models.load_model(str(folder / "m.keras"))
        model.compile(model.optimizer, "mse", run_eagerly=True)
        return model
    model = made()
    fit(model, 1, 100)  # what is there is replaced
    if kind == "weights":
        model.load_weights(str(folder / "w.weights.h5"))
    else:
        path = tf.train.latest_checkpoint(str(folder / "c"))
        tf.train.Checkpoint(model=model).restore(path).assert_existing_objects_matched()
    return model


def write_and_go_on(folder):
    """What was written; what the model predicts after more steps; the checkpoints' names."""
    model = made()
    fit(model, 2)
    write_all(model, folder)
    before = state(model)
    fit(model, 2, 5)
    here = sorted(path.name for path in (folder / "c").iterdir())
    return before, model.predict_on_batch(X), here


def read_and_go_on(kind, folder):
    model = read(kind, folder)
    after = state(model)
    fit(model, 2, 5)
    return after, model.predict_on_batch(X)


def message_of(call, *arguments, **keywords):
    try:
        call(*arguments, **keywords)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return None


def refused():
    """Paths of one's own; a rank that cannot write or read: all raise, and what was stays."""
    rank, folder, found = comm.current().rank, shared("refused"), {}
    model = made()
    fit(model, 1)
    checkpoint = tf.train.Checkpoint(model=model)
    own = {
        "weights": lambda: model.save_weights(str(folder / f"{rank}.weights.h5")),
        "model": lambda: model.save(str(folder / f"{rank}.keras")),
        "checkpoint": lambda: checkpoint.write(str(folder / f"{rank}")),
    }
    found["own"] = {kind: message_of(call) for kind, call in own.items()}
    path = str(folder / "w.weights.h5")
    model.save_weights(path)
    written = checkpoint.write(str(folder / "c"))
    before = state(model)
    fit(model, 1, 30)

    def fail(*arguments):
        raise OSError(28, "No space left on device", "here")

    whole = shard_file.write_shard
    shard_file.write_shard = fail if rank == 1 else whole
    found["full"] = [
        message_of(model.save_weights, path),
        message_of(lambda: checkpoint.write(str(folder / "c"))),
    ]
    shard_file.write_shard = whole
    found["left"] = []
    for load in (lambda: model.load_weights(path), lambda: checkpoint.read(written)):
        load()
        after = state(model)
        same = all(
            np.array_equal(after[table][name], before[table][name])
            for table in before
            for name in ("keys", "rows", "slot_rows")
        )
        found["left"].append(same)
    missing = str(folder / f"missing{rank}.weights.h5") if rank else path
    found["missing"] = message_of(model.load_weights, missing)
    found["copies"] = copies(folder / f"copy{rank}", rank)
    return found


def copies(folder, rank):
    """Each rank alone writes a file of the same relative path, and then all read it."""
    folder.mkdir()
    with world(1):
        model = made()
        fit(model, 1, rank)
        model.save_weights(str(folder / "w.weights.h5"))
        tf.train.Checkpoint(model=model).write(str(folder / "c"))
    model, here = made(), os.getcwd()
    before = model.get_layer("dense_of_files").get_weights()[0]
    os.chdir(folder)
    messages = [
        message_of(model.load_weights, "w.weights.h5"),
        message_of(lambda: tf.train.Checkpoint(model=model).read("c")),
    ]
    os.chdir(here)
    kept = np.array_equal(before, model.get_layer("dense_of_files").get_weights()[0])
    return {"messages": messages, "kept": kept}


class Interrupted(Exception):
    pass


class _Interrupt(tf.keras.callbacks.Callback):
    def on_epoch_begin(self, epoch, logs=None):
        if epoch == 2:
            raise Interrupted


def backup():
    """Keras' own BackupAndRestore over a shared folder: the bits of a run without interruption."""
    folder, expected = shared("backup"), unbroken()
    for callbacks in ([_Interrupt()], []):
        model = called()
        keras = tf.keras.callbacks.BackupAndRestore(str(folder / "shared"))
        try:
            history = fit(model, 4, callbacks=[keras, *callbacks])
        except Interrupted:
            history = None
    mine = str(folder / f"own{comm.current().rank}")
    own = tf.keras.callbacks.BackupAndRestore(mine)
    return {
        "epochs": len(history.history["loss"]),
        "same": np.array_equal(model.predict_on_batch(X), expected),
        "left": (folder / "shared").exists() and any((folder / "shared").iterdir()),
        "own": message_of(fit, called(), 2, callbacks=[own]),
    }


class _Preempt(tf.keras.callbacks.Callback):
    """A SIGTERM to rank 1 alone, in the second epoch."""

    def on_epoch_begin(self, epoch, logs=None):
        if epoch == 1 and comm.current().rank == comm.current().world_size - 1:
            os.kill(os.getpid(), signal.SIGTERM)


def preempted(folder):
    """`sok.callbacks.BackupAndRestore` saves at a SIGTERM: the exit's code, and the handler."""
    before, code = signal.getsignal(signal.SIGTERM), None
    callback = sok.callbacks.BackupAndRestore(str(folder), sigterm_every=1)
    try:
        fit(called(), 4, callbacks=[_Preempt(), callback])
    except SystemExit as end:
        code = end.code
    return code, signal.getsignal(signal.SIGTERM) == before


def go_on_after(folder):
    model = called()
    callback = sok.callbacks.BackupAndRestore(str(folder))
    epochs = len(fit(model, 4, callbacks=[callback]).history["loss"])
    return epochs, int(tf.convert_to_tensor(model.optimizer.iterations)), model.predict_on_batch(X)


def unbroken():
    model = called()
    fit(model, 4)
    return model.predict_on_batch(X)


def session():
    """MonitoredTrainingSession with a folder, interrupted and gone on with; Saver on the way."""
    found = {}
    for name, stops in (("unbroken", [6]), ("resumed", [3, 6])):
        for stop in stops:
            found[name] = _train_session(shared(f"session_{name}"), stop)
    folder = shared("session_resumed")
    comm.current().barrier()  # another rank may still write
    found["files"] = sorted(path.name for path in folder.iterdir() if "ckpt" in path.name)
    folder = shared("session_by_time")
    # Rank 1's clock is so slow that by itself it would never save.
    seconds = 1e-3 if sok.rank() == 0 else 6000
    first, content = _train_session(folder, 6, save_checkpoint_secs=seconds)
    saved = tf.train.get_checkpoint_state(str(folder)).all_model_checkpoint_paths
    found["by_time"] = first, content, [path.rpartition("-")[2] for path in saved]
    found["copy"] = message_of(_restore_a_copy_of_one_s_own, sok.rank())
    return found


def _restore_a_copy_of_one_s_own(rank):
    """The same tables on each rank, and other ordinary variables."""
    folder = shared(f"session_copy{rank}")
    shutil.copytree(shared("session_resumed"), folder)
    path = str(folder / "model.ckpt-6")
    content = tf.train.load_checkpoint(path)
    tensors = {name: content.get_tensor(name) for name in content.get_variable_to_shape_map()}
    tensors["w"] += np.float32(rank)
    names, everything = list(tensors), [""] * len(tensors)
    tf.raw_ops.SaveV2(
        prefix=path, tensor_names=names, shape_and_slices=everything, tensors=[*tensors.values()]
    )
    with tf.Graph().as_default(), tf.compat.v1.Session() as running:
        _session_variables()
        tf.compat.v1.train.Saver().restore(running, path)


def _session_variables():
    v1 = tf.compat.v1
    table = sok.EmbeddingVariable(4, name="in_session")
    weights = v1.get_variable("w", initializer=np.ones([8, 1], np.float32), use_resource=True)
    return table, weights, v1.train.get_or_create_global_step()


def _train_session(folder, stop, **options):
    v1 = tf.compat.v1
    options = options or {"save_checkpoint_steps": 2}
    rank, count = sok.rank(), BATCH // sok.size()
    with tf.Graph().as_default():
        v1.set_random_seed(3)
        table, weights, step = _session_variables()
        mine = slice(rank * count, (rank + 1) * count)
        rows = tf.gather(table, tf.constant(X[mine]))
        error = tf.matmul(tf.reshape(rows, [count, 8]), weights) - tf.constant(Y[mine])
        optimizer = sok.OptimizerWrapper(v1.train.AdamOptimizer(0.05))
        train = optimizer.minimize(tf.reduce_mean(error**2), global_step=step)
        found = table.snapshot()
        content = [found.keys, found.rows, found.slot_rows, weights.read_value(), step]
        hooks = [v1.train.StopAtStepHook(last_step=stop)]
        folder.mkdir(parents=True, exist_ok=True)
        with v1.train.MonitoredTrainingSession(
            checkpoint_dir=str(folder),
            hooks=hooks,
            log_step_count_steps=None,
            save_summaries_steps=None,
            **options,
        ) as running:
            first = int(running.run(step))
            while not running.should_stop():
                running.run(train)
        with v1.Session() as again:
            v1.train.Saver().restore(again, tf.train.latest_checkpoint(str(folder)))
            last = again.run(content)
    return first, last
