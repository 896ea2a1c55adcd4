"""Models whose files several ranks write together, and that other numbers of ranks read.

In one launch, ranks 0 to n-1 play a world of n ranks, by a communicator of their own.
"""

import contextlib
import traceback

import numpy as np
import tensorflow as tf

import sok_like as sok
import sok_like.dist_model_parallel as dmp
from sok_like.runtime.ranks import comm
from sok_like.table.variable import is_embedding_variable, unwrap
from tests.training import content

BATCH = 12
X = np.arange(2 * BATCH).reshape(BATCH, 2)
Y = np.linspace(-1, 1, BATCH, dtype=np.float32)[:, np.newaxis]
KINDS = ("weights", "model", "checkpoint")
# Dense tables: by rows, by columns, whole on one rank, replicated. X + 100 are rows of all.
TABLES = [(400, 4), (140, 8), (150, 6), (130, 2)]
WAYS = {"row_slice_threshold": 1500, "column_slice_threshold": 1000, "data_parallel_threshold": 300}


class Interrupted(Exception):
    pass


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


@tf.keras.utils.register_keras_serializable("files")
class Pair(tf.keras.layers.Layer):
    """A user's layer: two tables, one of them with policies, and an ordinary weight between."""

    def __init__(self, dim=4, bare=False, table=None, **kwargs):
        super().__init__(**kwargs)
        option = sok.EmbeddingVariableOption(record_statistics=True)
        made = [
            sok.EmbeddingVariable(dim, name=f"{self.name}_a") if table is None else table,
            sok.EmbeddingVariable(dim, name=f"{self.name}_b", ev_option=option),
        ]
        self.dim, self.bare = dim, bare
        self.first = made[0] if bare else made[0].as_weight()
        self.scale = self.add_weight(name="scale", shape=[dim], initializer="ones")
        # Under Keras 3 tf.train.Checkpoint finds no table in a list, and a save there raises.
        self.second = [made[1]] if bare else made[1].as_weight()

    def call(self, keys):
        tables = self.first, self.second[0] if self.bare else self.second
        both = [tf.nn.embedding_lookup(table, keys) for table in tables]
        return tf.reduce_mean(both[0] * self.scale + both[1], axis=1)

    def get_config(self):
        return {**super().get_config(), "dim": self.dim, "bare": self.bare}


def made(whole=False):
    """A model of hash tables, one with a filter; `whole`: of a user's and of dense ones, too."""
    tf.keras.utils.set_random_seed(3)
    keys = tf.keras.Input([2], dtype="int64")
    layer = sok.DistributedEmbedding("sum", None, 4, slot_num=2, max_nnz=1, name="files_one")
    option = sok.EmbeddingVariableOption(filter_option=sok.CounterFilter(2))
    group = sok.GroupEmbedding(
        {"a": 4}, combiners="sum", name="files_group", table_options={"a": {"ev_option": option}}
    )
    vectors = [layer(keys), group({"a": keys})["a"]]
    if whole:
        inner = tf.keras.Input([2], dtype="int64")
        vectors.append(tf.keras.Model(inner, Pair(name="files_pair")(inner))(keys))
        tables = [tf.keras.layers.Embedding(*size) for size in TABLES]
        dense = dmp.DistributedEmbedding(
            tables, strategy="memory_balanced", name="files_dense", **WAYS
        )
        vectors += dense([keys] * len(tables))
        dense.set_weights([np.sin(np.arange(n * m) / 7).reshape(n, m) for n, m in TABLES])
    flat = [tf.keras.layers.Flatten()(each) for each in vectors]
    start = tf.keras.initializers.GlorotUniform(5)  # ranks draw tables of their own before
    top = tf.keras.layers.Dense(1, kernel_initializer=start, name="files_top")
    model = tf.keras.Model(keys, top(tf.keras.layers.Concatenate()(flat)))
    model.compile(sok.OptimizerWrapper(tf.keras.optimizers.Adam(0.05)), "mse", run_eagerly=True)
    return model


def called():
    """A model with weights."""
    model = made()
    model(X[:1])
    return model


def mine(array):
    """This rank's share of the batch."""
    return np.array_split(array, comm.current().world_size)[comm.current().rank]


def fit(model, epochs, shift=0, **options):
    """On this rank's share of the batch."""
    x, y = mine(X) + shift, mine(Y)
    if options:
        options |= {"batch_size": len(x), "epochs": epochs, "verbose": 0, "shuffle": False}
        return model.fit(x, y, **options)
    for _ in range(epochs):  # as `fit` does, whose pipelines take longer than the steps
        model.train_on_batch(x, y)
    return None


def tables_of(model):
    return [unwrap(each) for each in model.variables if is_embedding_variable(each)]


def state(model):
    """Keys, rows, slot rows and records of this rank, by table."""
    return {table.table_name: content(table) for table in tables_of(model)}


def everything(model):
    """The tables' content, and all that this rank has of ordinary weights and slot variables."""
    optimizer = getattr(getattr(model, "optimizer", None), "variables", [])
    variables = [*model.weights, *(optimizer() if callable(optimizer) else optimizer)]
    ordinary = [np.asarray(each) for each in variables if not is_embedding_variable(each)]
    return {"tables": state(model), "ordinary": dict(enumerate(ordinary))}


def check_same(after, before, what=""):
    """Arrays in dictionaries of dictionaries."""
    assert after.keys() == before.keys(), what
    for name, value in before.items():
        if isinstance(value, dict):
            check_same(after[name], value, f"{what} {name}")
        else:
            np.testing.assert_array_equal(after[name], value, f"{what} {name}")


def is_same(after, before):
    try:
        check_same(after, before)
    except AssertionError:
        return False
    return True


def by_key(parts):
    """Arrays of one table, of all ranks, in the order of the keys."""
    keys = np.concatenate([part["keys"] for part in parts])
    order = np.argsort(keys)
    arrays = {"keys": keys[order]}
    for name in ("rows", "slot_rows", "records"):
        filled = [part[name] for part in parts if len(part["keys"])] if name in parts[0] else []
        if filled:
            arrays[name] = np.concatenate(filled)[order]
    if "waiting" in parts[0]:
        waiting = np.concatenate([part["waiting"] for part in parts])
        arrays["waiting"] = waiting[np.argsort(waiting[:, 0])]
    for name in ("optimizer_step", "initial_row_scale"):
        arrays[name] = np.unique([part[name] for part in parts])
    return arrays


def write(model, folder, kinds=KINDS):
    folder.mkdir(parents=True, exist_ok=True)
    if "weights" in kinds:
        model.save_weights(str(folder / "w.weights.h5"))
    if "model" in kinds:
        model.save(str(folder / "m.keras"))
    if "checkpoint" in kinds:
        tf.train.Checkpoint(model=model).write(str(folder / "c"))


def read(kind, folder, make=made):
    """A model with what was written."""
    if kind == "model":
        model = tf.keras.models.load_model(str(folder / "m.keras"))
        model.compile(model.optimizer, "mse", run_eagerly=True)
        return model
    model = make()
    fit(model, 1, 100)  # what is there is replaced
    load(kind, model, folder)
    return model


def load(kind, model, folder):
    if kind == "weights":
        model.load_weights(str(folder / "w.weights.h5"))
    else:
        tf.train.Checkpoint(model=model).read(str(folder / "c")).assert_existing_objects_matched()


@contextlib.contextmanager
def flipped(path, at):
    """In this scope, a bit of a file is another one."""
    data = path.read_bytes()
    path.write_bytes(data[:at] + bytes([data[at] ^ 16]) + data[at + 1 :])
    yield
    path.write_bytes(data)


@contextlib.contextmanager
def on_rank(number, scope):
    """While all ranks are in this scope, one is in the other scope, too."""
    comm.current().barrier()
    with scope if sok.rank() == number else contextlib.nullcontext():
        comm.current().barrier()
        yield
        comm.current().barrier()
    comm.current().barrier()
