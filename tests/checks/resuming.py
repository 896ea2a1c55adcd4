"""`fit` that goes on in the middle of an epoch, on one rank and on two."""

import contextlib
import os
import warnings

import numpy as np
import tensorflow as tf

from tests.checks.files import Interrupted

BATCH, BATCHES = 4, 6
KEYS = np.random.default_rng(0).integers(0, 40, [BATCH * BATCHES, 2])
# Data of one `fit`, and whether a part of the epoch can be left out.
KINDS = {
    "plain": True,
    "unknown size": True,
    "stream": True,  # one pass over the data in three epochs
    "repeated": True,
    "seeded": True,
    "each epoch": False,
    "no seed": False,
    "overtaking": False,
    "arrays": True,
    "shuffled arrays": False,
    "sequence": True,
    "two at once": True,
}
KINDS_ON_RANKS = ("plain", "stream") if os.environ.get("SLOW") else ("stream",)


def made(kind="plain"):
    import sok_like as sok

    tf.keras.utils.set_random_seed(3)
    keys = tf.keras.Input([2], dtype="int64")
    rows = sok.GroupEmbedding({"a": 4}, combiners="sum", name=f"resumed_{kind}".replace(" ", "_"))
    model = tf.keras.Model(keys, tf.keras.layers.Dense(1)(rows({"a": keys})["a"]))
    # Keras counts the step that finds the end of data of unknown size, and Adam reads that count.
    rule = tf.keras.optimizers.Adagrad if kind == "unknown size" else tf.keras.optimizers.Adam
    optimizer = sok.OptimizerWrapper(rule(0.05))
    model.compile(optimizer, "mse", steps_per_execution=2 if kind == "two at once" else 1)
    model(KEYS[:1])
    return model


def sequence(keys, labels, size):
    base = getattr(tf.keras.utils, "PyDataset", None) or tf.keras.utils.Sequence

    class Batches(base):
        def __len__(self):
            return BATCHES

        def __getitem__(self, number):
            mine = slice(number * size, (number + 1) * size)
            return keys[mine], labels[mine]

    return Batches()


def data(kind):
    """Arguments of `fit`; on each rank its share."""
    from sok_like.runtime.ranks import comm

    ranks, rank = comm.current().world_size, comm.current().rank
    keys, size = KEYS[rank::ranks], BATCH // ranks
    labels = np.cos(keys.sum(1, keepdims=True)).astype(np.float32)
    if "arrays" in kind:
        return {"x": keys, "y": labels, "batch_size": size, "shuffle": kind != "arrays"}
    if kind == "sequence":
        return {"x": sequence(keys, labels, size), "shuffle": False}
    found = tf.data.Dataset.from_tensor_slices((keys, labels))
    if kind == "each epoch":
        found = found.shuffle(100, seed=7)
    if kind == "seeded":
        found = found.shuffle(100, seed=7, reshuffle_each_iteration=False)
    if kind == "no seed":
        tf.random.set_seed(None)
        found = found.shuffle(100, reshuffle_each_iteration=False)
    if kind == "overtaking":
        found = found.map(lambda *each: each, num_parallel_calls=2, deterministic=False)
    found = found.batch(size)
    if kind == "unknown size":
        found = found.filter(lambda keys, _: tf.reduce_max(keys) >= 0)
    if kind == "repeated":
        found = found.repeat()
    steps = {"stream": BATCHES // 3, "repeated": 4}.get(kind)
    return {"x": found, "steps_per_epoch": steps}


class Recorded(tf.keras.callbacks.Callback):
    """Notes the numbers of trained batches; ends the training behind one of them."""

    def __init__(self, stop_at=None):
        super().__init__()
        self.stop_at, self.seen = stop_at, []

    def on_epoch_begin(self, epoch, logs=None):
        self.epoch = epoch

    def on_train_batch_end(self, batch, logs=None):
        self.seen.append((self.epoch, batch))
        if self.seen[-1] == self.stop_at:
            raise Interrupted


def train(kind, folder=None, stop_at=None, model=None, **options):
    """A `fit`; returns its model, the batches, the epochs that ended, and the warnings."""
    import sok_like as sok

    model = model or made(kind)
    recorded, callbacks = Recorded(stop_at), []
    if folder is not None:
        options = {"save_freq": 1, **options}
        callbacks = [sok.callbacks.BackupAndRestore(str(folder), **options)]
    epochs = []
    ended = tf.keras.callbacks.LambdaCallback(on_epoch_end=lambda epoch, logs: epochs.append(epoch))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with contextlib.suppress(Interrupted):
            model.fit(**data(kind), epochs=3, verbose=0, callbacks=[*callbacks, ended, recorded])
    said = [str(each.message) for each in caught if "a second time" in str(each.message)]
    return model, recorded.seen, epochs, said


def interrupted(kind, folder):
    """What an unbroken training predicts, and the batches after the one that ends this one."""
    expected, batches, *_ = train(kind)
    stop = len(batches) // 2
    train(kind, folder, batches[stop])
    return expected.predict_on_batch(KEYS), batches[stop + 1 :]


def go_on(kind, folder):
    model, seen, _, said = train(kind, folder)
    return model.predict_on_batch(KEYS), seen, said
