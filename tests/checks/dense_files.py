"""Dense tables of `dist_model_parallel`, which ranks write and read together, or none does."""

import pathlib

import numpy as np
import tensorflow as tf

from tests.checks.files import BATCH, X, Y, fit, message_of, shared, tables_of


def written():
    """Dense tables of dist_model_parallel, in a checkpoint and in Keras' files: each rank's own."""
    import sok_like.dist_model_parallel as dmp
    from sok_like.runtime.ranks import comm

    folder, rows = shared("dense"), [20, 7]
    models, states = [], []
    for _ in range(2):
        tf.keras.utils.set_random_seed(comm.current().rank)
        keys = [tf.keras.Input([2], dtype="int64") for _ in rows]
        layer = dmp.DistributedEmbedding([tf.keras.layers.Embedding(n, 4) for n in rows])
        flat = [tf.keras.layers.Flatten()(each) for each in layer(keys)]
        both = tf.keras.layers.Concatenate()(flat)
        model = tf.keras.Model(keys, tf.keras.layers.Dense(1, kernel_initializer="ones")(both))
        optimizer = dmp.DistributedOptimizer(tf.keras.optimizers.Adam(0.1 / (1 + len(models))))
        model.compile(optimizer, "mse", run_eagerly=True)
        models.append((model, layer))
        fit_model(model, rows)
        if len(models) == 1:
            tf.train.Checkpoint(model=model).write(str(folder / "c"))
        else:
            tf.train.Checkpoint(model=model).read(str(folder / "c"))
        state = layer.get_optimizer_state(model.optimizer, all_ranks=True)
        states.append((layer.get_weights(all_ranks=True), state))
    model, rank = models[0][0], comm.current().rank
    own = [
        message_of(tf.train.Checkpoint(model=model).write, str(folder / str(rank))),
        message_of(model.save_weights, str(folder / f"{rank}.weights.h5")),
    ]
    found = {"states": states, "own": own, "failed": fails(folder, models[0])}
    path = shared("dense_shared.h5")
    calls = [model.save]
    if not hasattr(tf.keras, "version"):  # tf_keras; Keras 3 has no such files of weights
        calls += [model.save_weights, model.load_weights]
    found["h5"] = [message_of(call, str(path)) for call in calls]
    found["h5 file"] = path.exists()
    model.save(str(folder / "once.keras"), overwrite=False)
    found["twice"] = message_of(model.save, str(folder / "once.keras"), overwrite=False)
    found["renamed"] = renamed(folder)
    found["skipped"] = skipped(str(folder / "w.weights.h5"))
    return found


def skipped(path):
    """The second table, which one rank holds, has another shape than in the file."""
    import sok_like.dist_model_parallel as dmp

    keys = [tf.keras.Input([2], dtype="int64") for _ in range(2)]
    layer = dmp.DistributedEmbedding([tf.keras.layers.Embedding(n, 4) for n in (20, 8)])
    model, before = tf.keras.Model(keys, layer(keys)), layer.get_weights(all_ranks=True)
    message = message_of(model.load_weights, path, skip_mismatch=True)
    return message, all(map(np.array_equal, layer.get_weights(all_ranks=True), before))


def renamed(folder):
    """A file of tables that Keras named, read into a model made later in the same process."""
    import sok_like as sok

    models = []
    for _ in range(2):
        keys = tf.keras.Input([2], dtype="int64")
        rows = sok.HashEmbedding(4, combiner="sum")(keys)
        model = tf.keras.Model(keys, tf.keras.layers.Dense(1, kernel_initializer="ones")(rows))
        model.compile(sok.OptimizerWrapper(tf.keras.optimizers.SGD(0.1)), "mse", run_eagerly=True)
        models.append(model)
    first, second = models
    fit(first, 2)
    for write, read in (
        (first.save_weights, second.load_weights),
        (tf.train.Checkpoint(first).write, tf.train.Checkpoint(second).read),
    ):
        fit(second, 1)
        write(str(folder / "renamed.weights.h5"))
        read(str(folder / "renamed.weights.h5"))
    names = [tables_of(model)[0].table_name for model in models]
    return names, [model.predict_on_batch(X) for model in models]


def fails(folder, trained):
    """A rank that cannot write, and one that cannot read: all raise, and what was stays."""
    from sok_like.runtime.ranks import comm
    from sok_like.saving.format import array_files

    (model, layer), rank, path = trained, comm.current().rank, str(folder / "w.weights.h5")
    model.save_weights(path)
    before = layer.get_weights(all_ranks=True)
    layer.set_weights([each + 1 for each in before])

    def fail(*arguments):
        raise OSError(28, "No space left on device", "here")

    whole = array_files.write
    array_files.write = fail if rank == 1 else whole
    messages = [message_of(model.save_weights, path)]
    array_files.write = whole
    beside = pathlib.Path(f"{path}.tables")
    (file,) = beside.glob("dense*/1-of-2.npz")
    comm.current().barrier()
    if rank == 1:
        file.rename(file.with_suffix(".away"))
    comm.current().barrier()
    messages.append(message_of(model.load_weights, path))
    kept = all(map(np.array_equal, layer.get_weights(all_ranks=True), [w + 1 for w in before]))
    comm.current().barrier()
    if rank == 1:
        file.with_suffix(".away").rename(file)
    comm.current().barrier()
    model.load_weights(path)
    same = all(map(np.array_equal, layer.get_weights(all_ranks=True), before))
    return {"messages": messages, "kept": kept, "same": same}


def fit_model(model, rows):
    keys = [np.arange(2 * BATCH).reshape(BATCH, 2) % n for n in rows]
    model.fit(keys, Y, batch_size=BATCH, epochs=2, verbose=0)
