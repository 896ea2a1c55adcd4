"""A `fit` that a server follows: `sok.callbacks.ServeWhileTraining`, and a reader beside it."""

import datetime
import json
import os
import pathlib
import subprocess
import sys
import tempfile
import time

import numpy as np
import tensorflow as tf

BATCH, BATCHES = 200, 18
KEYS = np.random.default_rng(0).integers(-(2**63), 2**63, [BATCH * BATCHES, 2])
ASKED = np.r_[KEYS[::40, 0], 5, -5]  # some of them new, until late in the training


def checks(world_size):
    return {"followed": lambda: followed(world_size)} if world_size <= 2 else {}


def made(name):
    import sok_like as sok

    tf.keras.utils.set_random_seed(3)
    keys = tf.keras.Input([2], dtype="int64", name="keys")
    rows = sok.GroupEmbedding({"a": 4}, combiners="sum", name=name)({"a": keys})["a"]
    model = tf.keras.Model(keys, tf.keras.layers.Dense(1)(rows))
    model.compile(sok.OptimizerWrapper(tf.keras.optimizers.Adagrad(0.1)), "mse")
    return model


def data():
    import sok_like as sok

    found = tf.data.Dataset.from_tensor_slices((KEYS, np.ones([len(KEYS), 1], np.float32)))
    return sok.shard(found, drop_remainder=True).batch(BATCH // sok.size())


class _Wait(tf.keras.callbacks.Callback):
    """Lets the reader answer before the first batch, and now and then after it."""

    def __init__(self, answers):
        super().__init__()
        self.answers = answers

    def on_train_batch_begin(self, batch, logs=None):
        if batch % 6 == 0:
            wait_for(lambda: len(read(self.answers)) > batch // 6)


def read(answers):
    lines = answers.read_text().splitlines() if answers.exists() else []
    return [json.loads(line) for line in lines]


def wait_for(condition):
    limit = time.monotonic() + 300
    while not condition():
        if time.monotonic() > limit:
            raise TimeoutError("the reader does not answer")
        time.sleep(0.05)


def followed(world_size):
    """The reader's answers; where the SavedModels are; and a fresh export of the end."""
    import sok_like as sok

    folder = pathlib.Path(tempfile.gettempdir()) / f"sok_live_{os.getppid()}_{world_size}"
    reader, answers = None, folder / "answers"
    if sok.rank() == 0:
        folder.mkdir()
        np.save(folder / "keys.npy", np.stack([ASKED, ASKED], 1))
        program = pathlib.Path(__file__).parent.parent / "callbacks" / "follower.py"
        # Stock TensorFlow: no rank, no package.
        clean = {k: v for k, v in os.environ.items() if not k.startswith(("OMPI", "PMI", "PRTE"))}
        clean.pop("PYTHONPATH", None)
        reader = subprocess.Popen([sys.executable, str(program), str(folder)], cwd="/", env=clean)
    model = made(f"live_{world_size}")
    serve = sok.callbacks.ServeWhileTraining(folder / "models", every=3)
    callbacks = [serve, _Wait(answers)] if sok.rank() == 0 else [serve]
    try:
        model.fit(data(), verbose=0, callbacks=callbacks)
        sok.export_saved_model(model, folder / "fresh")
        if reader is not None:
            (folder / "end").touch()
            assert reader.wait(300) == 0
    finally:
        if reader is not None:
            reader.kill()
    places = sorted(path.name for path in (folder / "models").iterdir())
    by_time = sok.callbacks.ServeWhileTraining(
        folder / "models", every=datetime.timedelta(milliseconds=20)
    )
    model.fit(data(), verbose=0, callbacks=[by_time])
    newest = max(int(path.name) for path in (folder / "models").glob("*[0-9]"))
    deltas = len(list((folder / "models").glob(f"{newest}.deltas/*.index")))
    return {"folder": folder, "places": places, "answers": read(answers), "by_time": deltas}
