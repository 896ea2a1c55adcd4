"""A dump of two ranks, which one and two restore and train on; and one of one, which three restore.

Each within one launch: `files.world`. In it the calls of a table are counted on several ranks
alone, so those that train it together must be the same ranks.
"""

import json
import pathlib

import numpy as np
import tensorflow as tf

import sok_like as sok
from sok_like.runtime.ranks import comm
from tests.checks.files import shared, world

DIM = 4
WRITERS = {2: 2, 3: 1}  # by number of ranks of the launch
READERS = {2: [1, 2], 3: [3]}


def checks(world_size):
    if world_size not in READERS:
        return {}
    found = {"restored": lambda: dumped_and_restored(WRITERS[world_size], READERS[world_size])}
    return found | ({"failure": fail_on_one_rank} if world_size == 2 else {})


def dumped_and_restored(writers, readers):
    """By `"dumped"` and number of readers: what this rank found, None where it had no part."""
    folder, found = shared("saver"), {}
    with world(writers) as group:
        found["dumped"] = train_and_dump(folder) if group is not None else None
    for number in readers:
        with world(number) as group:
            found[number] = restore_and_train(folder) if group is not None else None
    return found


def in_a_process(what, folder):
    """One of the functions below, in a process that has done nothing else."""
    sok.Init(global_batch_size=12, seed=7)
    return globals()[what](pathlib.Path(folder))


def train(layer, optimizer, steps):
    """The same `steps` on any number of ranks: the batch is split, its gradients are summed."""
    rank, world_size = comm.current().rank, comm.current().world_size
    for step in steps:
        keys = np.random.default_rng(step).integers(-60, 60, 24)[rank::world_size]
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(layer(tf.constant(keys)) ** 2)
        gradients = tape.gradient(loss, layer.trainable_variables)
        optimizer.apply_gradients(zip(gradients, layer.trainable_variables, strict=True))


def make():
    layer = sok.All2AllDenseEmbedding(None, DIM, 1, 1, dynamic_input=True, name="items")
    # With weight decay, rows of keys that come after the restore tell whether it was forgotten.
    return layer, sok.OptimizerWrapper(tf.keras.optimizers.AdamW(0.05, weight_decay=0.5))


def rows_of(layer):
    keys, rows = sok.export(layer.embedding_variable)
    return dict(zip(keys.numpy().tolist(), rows.numpy(), strict=True))


def train_and_dump(folder):
    layer, optimizer = make()
    train(layer, optimizer, range(6))
    dumped = sok.Saver().dump_to_file(layer.embedding_variable, folder)
    at_dump = rows_of(layer)
    train(layer, optimizer, range(6, 12))
    return {
        "status": dumped.numpy(),
        "manifest": json.loads((folder / "items.json").read_text()),
        "at_dump": at_dump,
        "later": rows_of(layer),
    }


def restore_and_train(folder):
    layer, optimizer = make()
    train(layer, optimizer, range(100, 106))  # what restoring replaces; also brings step to 6
    sok.Saver().restore_from_file(layer.embedding_variable, folder)
    restored = rows_of(layer)
    train(layer, optimizer, range(6, 12))
    return {"restored": restored, "later": rows_of(layer)}


def fail_on_one_rank():
    folder = shared("saver")
    layer, optimizer = make()
    train(layer, optimizer, range(2))
    before = rows_of(layer)
    mine = folder if comm.current().rank == 0 else folder / "missing"
    messages = {}
    for name in ("restore_from_file", "dump_to_file"):
        path = mine if name == "restore_from_file" else "/proc/no/such/folder"
        try:
            getattr(sok.Saver(), name)(layer.embedding_variable, path)
        except Exception as error:
            messages[name] = str(error)
    same = all(np.array_equal(before[k], row) for k, row in rows_of(layer).items())
    return {"messages": messages, "same": same and len(before) == len(rows_of(layer))}
