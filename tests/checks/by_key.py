"""A training step through each of TensorFlow's own lookups, with keys of every rank."""

import numpy as np
import tensorflow as tf

# Keys of the samples of each rank; they meet on both.
SAMPLES = [[[5, 8], [5], [-2, 5, 3]], [[8, 3], [2**40], [-2]]]
WEIGHTS = [[1.0, 2.0, 0.5, 1.0, 3.0, 1.0], [2.0, 1.0, 1.0, 4.0]]
KEYS = np.array([-2, 3, 5, 8, 2**40])
RATE = 0.5
LOOKUPS = ("gather", "embedding_lookup", "sparse", "weighted", "safe", "row", "of_layer")
COMBINED = ("sparse", "weighted", "safe")


def checks(world_size):
    return {"train": train, "weights": weights}


def samples(rank, world_size):
    """Keys and weights of a rank; all of them where there is one."""
    mine = [rank] if world_size > 1 else range(2)
    return [s for r in mine for s in SAMPLES[r]], [w for r in mine for w in WEIGHTS[r]]


def train():
    """Of each lookup what it finds, and the rows of all keys after a step of gradient descent."""
    import sok_like as sok
    from sok_like.runtime.ranks import comm

    rank, world_size = comm.current().rank, comm.current().world_size
    keys, weights = samples(rank, world_size)
    first = [sample[0] for sample in used("row", rank, world_size)]
    ragged = tf.ragged.constant(keys, dtype=tf.int64)
    weights = ragged.with_flat_values(tf.constant(weights))
    calls = {
        "gather": lambda table: tf.gather(table, ragged.flat_values),
        "embedding_lookup": lambda table: tf.nn.embedding_lookup(table, ragged.flat_values),
        "sparse": lambda table: tf.nn.embedding_lookup_sparse(table, ragged, None, combiner="sum"),
        "weighted": lambda table: tf.nn.embedding_lookup_sparse(
            table, ragged.to_sparse(), weights.to_sparse(), combiner="sum"
        ),
        "safe": lambda table: tf.nn.safe_embedding_lookup_sparse(
            table, ragged.to_sparse(), combiner="sum"
        ),
        "row": lambda table: tf.stack([table[key] for key in first]),
        "of_layer": lambda table: tf.nn.embedding_lookup(table, ragged.flat_values),
    }
    results = {}
    for name in LOOKUPS:
        table = sok.EmbeddingVariable(2, name=f"by_key_{name}")
        if name == "of_layer":  # under Keras 3 in a variable of Keras
            layer = sok.All2AllDenseEmbedding(None, 2, 1, 1, name="by_key_layer")
            table = layer.embedding_variable
        sok.assign(table, KEYS, start())
        optimizer = sok.OptimizerWrapper(tf.keras.optimizers.SGD(RATE))

        @tf.function
        def step(table=table, optimizer=optimizer, name=name):
            with tf.GradientTape() as tape:
                found = calls[name](table)
                loss = tf.reduce_sum(found)
            gradient = tape.gradient(loss, table)
            optimizer.apply_gradients([(gradient, table)])
            return found

        found = step().numpy()
        results[name] = found, tf.gather(table, KEYS).numpy()
    return results


def start():
    return np.stack([np.arange(5) + 1.0, np.arange(5) * -2.0], 1).astype(np.float32)


def used(name, rank, world_size):
    """The keys of each sample of a rank that a lookup reads."""
    keys, _ = samples(rank, world_size)
    if name == "row":
        return [[SAMPLES[r][0][0]] for r in ([rank] if world_size > 1 else range(2))]
    if name == "safe":  # TensorFlow takes negative keys for missing ones
        return [[key for key in sample if key >= 0] for sample in keys]
    return keys


def oracle(name, rank, world_size):
    """The same from NumPy: every key's row less the rate times how often it counts."""
    row = dict(zip(KEYS.tolist(), start(), strict=True))
    _, weights = samples(rank, world_size)
    weighted = name == "weighted"
    factors = iter(weights if weighted else np.ones(len(weights)))
    rows = [[row[key] * next(factors) for key in s] for s in used(name, rank, world_size)]
    combined = [np.sum(r, axis=0) if r else np.zeros(2) for r in rows]
    found = combined if name in COMBINED else [r for sample in rows for r in sample]
    counts = dict.fromkeys(KEYS.tolist(), 0.0)
    for r in range(2):
        flat = [key for sample in used(name, r, 2) for key in sample]
        for key, weight in zip(flat, WEIGHTS[r] if weighted else np.ones(len(flat)), strict=True):
            counts[key] += weight
    after = start() - RATE * np.array([counts[key] for key in KEYS.tolist()])[:, None]
    return np.array(found), after


def weights():
    """This rank's rows by key, before and after they were set back; what another rank's gives."""
    import sok_like as sok
    from sok_like.runtime.ranks import comm
    from sok_like.table.weights import TableWeights

    table = sok.EmbeddingVariable(2, name="by_key_weights")
    sok.assign(table, KEYS, start())
    got = table.numpy()
    before = dict(zip(got.keys.tolist(), got.rows.tolist(), strict=True))
    tf.gather(table, KEYS + 1)
    sok.assign(table, KEYS, -start())
    table.assign(got)
    after = dict(zip(*(t.numpy().tolist() for t in (sok.export(table))), strict=True))
    message = ""
    if comm.current().world_size > 1:
        other = np.array([1 - comm.current().rank], np.int64)
        try:
            table.assign(TableWeights("other", other, np.zeros([1, 2], np.float32)))
        except ValueError as error:
            message = str(error)
    return before, after, message
