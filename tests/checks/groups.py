"""A training by group lookups on ranks.

The group of a training has EmbeddingVariables of equal and other widths, each combiner, weights, a
shared table and a tf.Variable that is used twice.
"""

import numpy as np
import tensorflow as tf

import sok_like as sok
from tests.checks.parity import RATE, ranks_of
from tests.training import train_step

NUM_KEYS, STEPS, BATCH, MAX_HOTNESS = 20, 8, 9, 3
DIMS = {"a": 4, "b": 4, "c": 3, "d": 4, "e": 2}
DENSE = ("d", "e")  # tf.Variables; the others are EmbeddingVariables
FEATURES = [  # table, combiner, weighted, kind of ids
    ("a", "mean", False, "ragged"),
    ("d", "mean", True, "sparse"),
    ("b", "sum", False, "sparse"),
    ("c", "sqrtn", True, "ragged"),
    ("a", "sum", True, "sparse"),
    ("d", "sqrtn", False, "ragged"),
    ("e", "sum", False, "ragged"),
    ("b", "mean", True, "ragged"),
]


# ---- data ----


def keys():
    """int64 `[NUM_KEYS]`: the keys of hash tables; a tf.Variable's are their positions."""
    found = np.random.default_rng(4).integers(-(2**63), 2**63 - 1, NUM_KEYS, np.int64)
    found[:4] = [0, -1, 2**63 - 1, -(2**63)]
    return found


def batches():
    """Per step, a list with positions, lengths and weights of each feature, and targets."""
    rng = np.random.default_rng(5)
    for step in range(STEPS):
        last = NUM_KEYS - 4 + step // 5  # a key comes late, some never
        features = []
        for _ in FEATURES:
            lengths = rng.integers(0, MAX_HOTNESS + 1, BATCH)
            positions = rng.integers(0, last, [BATCH, MAX_HOTNESS])
            positions[0] = positions[0, 0]
            weights = rng.choice([0.0, 0.5, 1.0, 2.0], [BATCH, MAX_HOTNESS])
            features.append((positions, lengths, weights.astype(np.float32)))
        yield features, rng.normal(size=BATCH).astype(np.float32)


def initial_rows(name):
    """Of a tf.Variable, `[NUM_KEYS, dim]`."""
    rng = np.random.default_rng([6, ord(name)])
    return rng.normal(0, 0.3, [NUM_KEYS, DIMS[name]]).astype(np.float32)


def loss_of(outputs, targets):
    """Divided by the global batch, so that gradients add up over ranks."""
    return (
        tf.add_n([tf.reduce_sum((tf.tanh(o) - targets[:, tf.newaxis]) ** 2) for o in outputs])
        / BATCH
    )


def keras_optimizer(name):
    return {"adagrad": tf.keras.optimizers.Adagrad, "adam": tf.keras.optimizers.Adam}[name](RATE)


# ---- with sok ----


def make_tables():
    return {
        name: tf.Variable(initial_rows(name), name=name)
        if name in DENSE
        else sok.EmbeddingVariable(dim, name=f"group_{name}")
        for name, dim in DIMS.items()
    }


def train(optimizer_name):
    """Trains on this rank's samples; the outputs of every step, and the rows before and after."""
    rank, world_size = sok.rank(), sok.size()
    tables = make_tables()
    variables = list(tables.values())
    optimizer = sok.OptimizerWrapper(keras_optimizer(optimizer_name))
    optimizer.build(variables)

    def read_all():
        every = [np.arange(NUM_KEYS) if name in DENSE else keys() for name in tables]
        rows = sok.group_embedding_lookup(variables, every, training=False)
        return {name: row.numpy() for name, row in zip(tables, rows, strict=True)}

    def step(ids, weights, targets):
        def loss_and_rows():
            rows = sok.group_embedding_lookup_sparse(
                [tables[name] for name, *_ in FEATURES],
                ids,
                [combiner for _, combiner, *_ in FEATURES],
                sp_weights=weights,
                name=f"train_{optimizer_name}",
            )
            return loss_of(rows, targets), rows

        return train_step(optimizer, variables, loss_and_rows)[1]

    if optimizer_name == "adam":  # in a function of an unknown batch size
        step = tf.function(step, reduce_retracing=True)
    initial, vectors = read_all(), []
    for number, (features, targets) in enumerate(batches()):
        mine = ranks_of(number, BATCH, world_size) == rank
        ids, weights = [], []
        for (name, _, weighted, kind), arrays in zip(FEATURES, features, strict=True):
            positions, lengths, of_ids = (array[mine] for array in arrays)
            given = positions if name in DENSE else keys()[positions]
            pair = [tf.RaggedTensor.from_tensor(a, lengths) for a in (given, of_ids)]
            pair = [ragged.to_sparse() for ragged in pair] if kind == "sparse" else pair
            ids.append(pair[0])
            weights.append(pair[1] if weighted else None)

        vectors.append([row.numpy() for row in step(ids, weights, tf.constant(targets[mine]))])
    return {"initial": initial, "vectors": vectors, "final": read_all()}
