"""`sok.report` and `TableMetrics` in `fit`: what each rank finds."""

import contextlib
import io
import os
import pathlib
import tempfile
from unittest import mock

import numpy as np
import tensorflow as tf

from tests.checks.files import message_of

KEYS = list(range(12))
# The last of 3 steps of 398 keys has key 0 199 times, and 199 others once.
SKEWED = np.concatenate([np.arange(796), np.zeros(199, np.int64), np.arange(800, 999)])


def checks(world_size):
    return {"reported": lambda: reported(world_size)} if world_size <= 2 else {}


def reported(world_size):
    """The same samples on every rank."""
    import sok_like as sok

    folder = pathlib.Path(tempfile.gettempdir()) / f"sok_inside_{os.getppid()}_{world_size}"
    inputs = tf.keras.Input([1], dtype="int64")
    rows = sok.DistributedEmbedding("sum", None, 4, slot_num=1, max_nnz=1, name="inside")(inputs)
    model = tf.keras.Model(inputs, tf.keras.layers.Flatten()(rows))
    model.compile(sok.OptimizerWrapper(tf.keras.optimizers.SGD(0.1)), "mse")
    metrics = sok.callbacks.TableMetrics(every=2, log_dir=folder)
    keys = np.array(KEYS)[:, np.newaxis]
    options = {"batch_size": 2, "shuffle": False, "verbose": 0, "callbacks": [metrics]}
    # A part of TensorBoard, which need not be there.
    with mock.patch.object(tf.summary, "scalar", side_effect=ModuleNotFoundError("tensorboard")):
        model.fit(keys, np.zeros([12, 4]), **options)
    skewed = sok.callbacks.TableMetrics(every=3, log_dir=f"{folder}_skewed")
    of_skewed = {**options, "batch_size": 398, "callbacks": [skewed]}
    model.fit(SKEWED[:, np.newaxis], np.zeros([len(SKEWED), 4]), **of_skewed)
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        tables = sok.report(model)
    unwritable = sok.callbacks.TableMetrics(log_dir=__file__)
    plain = tf.keras.Sequential([tf.keras.Input([1]), tf.keras.layers.Dense(1)])
    plain.compile("sgd", "mse")
    try:
        plain.fit(np.zeros([2, 1]), np.zeros([2, 1]), **options)
        without = ""
    except ValueError as error:
        without = str(error)
    return {
        "tables": [{**t._asdict(), "imbalance": t.imbalance} for t in tables],
        "printed": printed.getvalue(),
        "without": without,
        "unwritable": message_of(
            model.fit, keys, np.zeros([12, 4]), **{**options, "callbacks": [unwritable]}
        ),
        "folder": str(folder),
    }
