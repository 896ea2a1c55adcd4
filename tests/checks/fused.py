"""A functional model whose embedding layers look up together, beside one of stock Embeddings."""

import numpy as np
import tensorflow as tf

import sok_like as sok
from sok_like.runtime.ranks import comm

BATCH, STEPS, KEYS, RATE = 12, 4, 20, 0.1


def checks(world_size):
    return {"train": train, "exchanges": exchanges} if world_size <= 2 else {}


def data():
    rng = np.random.default_rng(3)
    samples = BATCH * STEPS
    inputs = {
        "a": rng.integers(0, KEYS, [samples, 3]),
        "b": rng.integers(0, KEYS, [samples, 2, 2]),
        "c": rng.random([samples, 1]).astype(np.float32),
    }
    return inputs, rng.random([samples, 1]).astype(np.float32)


def head(a, b, c, other):
    layers = tf.keras.layers
    parts = [layers.Flatten()(rows) for rows in (a, b, c)]
    return layers.Dense(1, kernel_initializer="ones")(layers.Concatenate()([*parts, other]))


def model(name):
    """Three tables; the third one's keys are made from an input by a layer of Keras."""
    a = tf.keras.Input([3], dtype="int64", name="a")
    b = tf.keras.Input([2, 2], dtype="int64", name="b")
    c = tf.keras.Input([1], name="c")
    hashed = tf.keras.layers.Hashing(KEYS)(a)
    rows = [
        sok.DistributedEmbedding(
            "sum", None, 4, slot_num=3, max_nnz=1, embedding_initializer="ones", name=f"{name}_a"
        )(a),
        sok.DistributedEmbedding(
            "mean", None, 2, slot_num=2, max_nnz=2, embedding_initializer="ones", name=f"{name}_b"
        )(b),
        sok.All2AllDenseEmbedding(None, 4, 3, 1, embedding_initializer="ones", name=f"{name}_c")(
            hashed
        ),
    ]
    return tf.keras.Model({"a": a, "b": b, "c": c}, head(*rows, c))


def stock():
    """The same with one row per number, trained on the batches of all ranks."""
    a = tf.keras.Input([3], dtype="int64", name="a")
    b = tf.keras.Input([2, 2], dtype="int64", name="b")
    c = tf.keras.Input([1], name="c")
    tables = [
        tf.keras.layers.Embedding(KEYS, dim, embeddings_initializer="ones") for dim in (4, 2, 4)
    ]
    pairs = tables[1](b)
    halves = tf.keras.layers.Average()([pairs[:, :, 0], pairs[:, :, 1]])
    hashed = tf.keras.layers.Hashing(KEYS)(a)
    whole = tf.keras.Model(
        {"a": a, "b": b, "c": c}, head(tables[0](a), halves, tables[2](hashed), c)
    )
    whole.compile(tf.keras.optimizers.SGD(RATE), "mse")
    inputs, targets = data()
    whole.fit(inputs, targets, batch_size=BATCH, verbose=0, shuffle=False)
    return [table.get_weights()[0] for table in tables]


def mine(array):
    """This rank's part of each batch."""
    ranks = comm.current()
    batches = array.reshape(STEPS, BATCH, *array.shape[1:])
    return np.concatenate(np.split(batches, ranks.world_size, axis=1)[ranks.rank])


def train():
    """Keys and rows of each table after an epoch; and what the unfused model shares."""
    plain = model("fused")
    fused = sok.fuse_lookups(plain)
    fused.compile(sok.OptimizerWrapper(tf.keras.optimizers.SGD(RATE)), "mse")
    inputs, targets = data()
    inputs = {name: mine(array) for name, array in inputs.items()}
    batch = BATCH // comm.current().world_size
    fused.fit(inputs, mine(targets), batch_size=batch, verbose=0, shuffle=False)
    tables = [plain.get_layer(f"fused_{which}").table for which in "abc"]
    return {
        "rows": [[part.numpy() for part in sok.export(table)] for table in tables],
        "alike": np.array_equal(plain.predict(inputs, verbose=0), fused.predict(inputs, verbose=0)),
    }


def exchanges():
    """How many exchanges a forward pass has: of the model as it is, and fused."""
    plain = model("counted")
    inputs = {name: tf.constant(mine(array)) for name, array in data()[0].items()}

    def count(model):
        step = tf.function(lambda inputs: model(inputs, training=True))
        operations = step.get_concrete_function(inputs).graph.get_operations()
        return sum(operation.type == "SokBeginWait" for operation in operations)

    return count(plain), count(sok.fuse_lookups(plain))
