"""The same training twice: with sok's layers on ranks, and with dense tables of stock TensorFlow.

Every case is 14 steps, or 50 with SLOW=1, over tables that differ in layer, combiner and indexing.
All tables of a case are trained in one step, each under a small head of ordinary weights. Samples
are dealt to ranks unevenly, some ranks getting none; the oracle sees the joined batch in one
process.
"""

import os

import numpy as np
import tensorflow as tf

import sok_like as sok

SEED = 7
NUM_KEYS, DIM, SLOTS, NNZ, BATCH = 48, 4, 2, 3, 12
STEPS = 50 if os.environ.get("SLOW") else 14
TABLES = {  # name: (combiner, None for the layer that does not combine; hash table)
    "sum": ("Sum", True),
    "mean": ("mean", True),
    "sqrtn": ("sqrtn", True),
    "dense": (None, True),
    "sum_rows": ("sum", False),
    "mean_rows": ("Mean", False),
    "sqrtn_rows": ("sqrtn", False),
    "dense_rows": (None, False),
}
RATE = 0.01
KERAS = {
    "sgd": lambda: tf.keras.optimizers.SGD(RATE),
    "momentum": lambda: tf.keras.optimizers.SGD(RATE, momentum=0.9),
    "adagrad": lambda: tf.keras.optimizers.Adagrad(RATE),
    "adam": lambda: tf.keras.optimizers.Adam(RATE),
    "lazy_adam": lambda: tf.keras.optimizers.Adam(RATE),
    "ftrl": lambda: tf.keras.optimizers.Ftrl(RATE, l1_regularization_strength=0.01, beta=0.1),
}


def tables(some):
    """Names of the tables that are trained: of the odd and even ones some combine, some hash."""
    odd = ("sum", "dense", "mean_rows", "sqrtn_rows")
    return [name for name in TABLES if (name in odd) == (some == "odd")]


# ---- data ----


def key_numbers():
    """int64 `[NUM_KEYS]`: the keys of hash tables, extremes among them."""
    keys = np.random.default_rng(0).integers(-(2**63), 2**63 - 1, NUM_KEYS, np.int64)
    keys[:6] = [0, -1, 1, -(2**63), 2**63 - 1, 2**32]
    return keys


def batches():
    """Key indices [batch, SLOTS, NNZ], lengths [batch, SLOTS] and targets [batch], a step each.

    Index 0 is there at every step, 1 at every second, 2 at every eleventh, 3 at the first and the
    last, the last two never; the others from a step of their own on, in about half of the steps.
    """
    rng = np.random.default_rng(1)
    birth = rng.integers(0, STEPS - 5, NUM_KEYS)
    for step in range(STEPS):
        batch = 5 if step == STEPS - 1 else BATCH
        alive = (birth <= step) & (rng.random(NUM_KEYS) < 0.5)
        alive[-2:] = False
        alive[:4] = True, step % 2 == 0, step % 11 == 0, step in (0, STEPS - 1)
        ids = rng.choice(np.flatnonzero(alive), [batch, SLOTS, NNZ])
        ids[0, 0] = np.flatnonzero(alive[:3])[-1]  # three times the same
        lengths = rng.integers(0, NNZ + 1, [batch, SLOTS])
        lengths[0] = NNZ
        lengths[1] = 0
        yield ids, lengths, rng.normal(1.0, 0.3, batch).astype(np.float32)


def ranks_of(step, batch, world_size):
    """The rank of each sample; the last rank gets none at every seventh step."""
    ranks = np.random.default_rng([2, step]).integers(0, world_size, batch)
    return ranks * (ranks < world_size - 1) if step % 7 == 3 else ranks


def sample_weights(step, batch, world_size, scale):
    """The factor of each sample's loss on its rank."""
    if scale == "sum":
        return np.full(batch, 1 / batch, np.float32)
    ranks = ranks_of(step, batch, world_size)
    return (1 / np.bincount(ranks, minlength=world_size)[ranks]).astype(np.float32)


def head_weights():
    """One kernel and one bias per table."""
    rng = np.random.default_rng(3)
    widths = [SLOTS * DIM * (1 if combiner else NNZ) for combiner, _ in TABLES.values()]
    return [(rng.uniform(0.1, 0.6, [w, 1]).astype(np.float32), np.zeros(1, "f")) for w in widths]


def _loss(outputs, targets, weights):
    return tf.add_n([tf.reduce_sum(weights * (tf.tanh(o[:, 0]) - targets) ** 2) for o in outputs])


# ---- with sok ----


def make_layer(name, world_size, scale="sum"):
    combiner, use_hashtable = TABLES[name]
    options = {
        "max_vocabulary_size_per_gpu": None if use_hashtable else -(-NUM_KEYS // world_size),
        "embedding_vec_size": DIM,
        "slot_num": SLOTS,
        "use_hashtable": use_hashtable,
        "gradient_scale": scale,
        "name": name,
    }
    if combiner is None:
        return sok.All2AllDenseEmbedding(nnz_per_slot=NNZ, **options)
    return sok.DistributedEmbedding(combiner, max_nnz=NNZ, **options)


def make_optimizer(name):
    if name == "lazy_adam":
        return sok.optimizers.LazyAdam(RATE)
    if name == "adam":
        return sok.tf.keras.optimizers.Adam(RATE)
    return sok.OptimizerWrapper(KERAS[name]())


def layer_input(name, keys, lengths):
    """One of the inputs that the layer of table `name` takes."""
    if TABLES[name][0] is None:
        return keys if name == "dense" else tf.reshape(keys, [-1, SLOTS * NNZ])
    rows = tf.RaggedTensor.from_tensor(
        tf.reshape(keys, [-1, NNZ]), lengths=tf.reshape(lengths, [-1])
    )
    if name.startswith("mean"):
        return rows
    if name.startswith("sqrtn"):
        return tf.RaggedTensor.from_uniform_row_length(rows, SLOTS)
    sparse = rows.to_sparse()
    shape = tf.stack([tf.cast(rows.nrows(), tf.int64), NNZ])
    return tf.SparseTensor(sparse.indices, sparse.values, shape)


def train(optimizer_name, scale, some):
    """Trains these tables on this rank's samples; the vectors, rows and weights it ends with."""
    rank, world_size = sok.rank(), sok.size()
    names = tables(some)
    layers = {name: make_layer(name, world_size, scale) for name in names}
    heads = [tf.keras.layers.Dense(1) for _ in names]
    weights_of = dict(zip(TABLES, head_weights(), strict=True))
    for head, name in zip(heads, names, strict=True):
        kernel, bias = weights_of[name]
        head.build([None, len(kernel)])
        head.set_weights([kernel, bias])
    optimizer = make_optimizer(optimizer_name)
    variables = [layer.embedding_variable for layer in layers.values()]
    variables += [variable for head in heads for variable in head.trainable_variables]
    every_key = tf.constant(_padded(key_numbers())), tf.constant(_padded(np.arange(NUM_KEYS)))
    everything = tf.fill([len(every_key[0]), SLOTS], tf.constant(1, tf.int64))

    def look_up(keys, ids, lengths, training):
        return [
            layer(layer_input(name, keys if TABLES[name][1] else ids, lengths), training=training)
            for name, layer in layers.items()
        ]

    widths = [len(weights_of[name][0]) for name in names]
    optimizer.build(variables)  # or the first step would be traced twice

    @tf.function(
        autograph=False,
        input_signature=[
            tf.TensorSpec([None, SLOTS, NNZ], tf.int64),
            tf.TensorSpec([None, SLOTS, NNZ], tf.int64),
            tf.TensorSpec([None, SLOTS], tf.int64),
            tf.TensorSpec([None], tf.float32),
            tf.TensorSpec([None], tf.float32),
        ],
    )
    def step(keys, ids, lengths, targets, weights):
        with tf.GradientTape() as tape:
            vectors = look_up(keys, ids, lengths, True)
            flat = [tf.reshape(v, [-1, width]) for v, width in zip(vectors, widths, strict=True)]
            outputs = [head(v) for v, head in zip(flat, heads, strict=True)]
            loss = _loss(outputs, targets, weights)
        gradients = tape.gradient(loss, variables)
        optimizer.apply_gradients(zip(gradients, variables, strict=True))
        return vectors

    def read_all():
        """The row of every key by evaluation lookups, `[NUM_KEYS, DIM]` per table."""
        rows = look_up(*every_key, everything, False)
        return {
            name: v.numpy().reshape(len(v), SLOTS, -1)[:, 0, :DIM][:NUM_KEYS]
            for name, v in zip(layers, rows, strict=True)
        }

    initial, sizes = read_all(), [int(layer.table.size()) for layer in layers.values()]
    vectors = []
    for number, (ids, lengths, targets) in enumerate(batches()):
        mine = ranks_of(number, len(ids), world_size) == rank
        weights = sample_weights(number, len(ids), world_size, scale)
        ids = ids[mine]
        found = step(key_numbers()[ids], ids, lengths[mine], targets[mine], weights[mine])
        vectors.append([v.numpy() for v in found])
    trained = [int(layer.table.size()) for layer in layers.values()]
    final = read_all()
    return {
        "initial": initial,
        "final": final,
        "sizes": (sizes, trained, [int(layer.table.size()) for layer in layers.values()]),
        "vectors": {n: [v[i] for v in vectors] for i, n in enumerate(layers)},
        "export": {
            n: [tensor.numpy() for tensor in sok.export(layer.embedding_variable)]
            for n, layer in layers.items()
        },
        "heads": {name: head.get_weights() for name, head in zip(names, heads, strict=True)},
    }


def _padded(keys):
    """`[NUM_KEYS, SLOTS, NNZ]`, each key at all positions of its sample."""
    return np.tile(keys[:, None, None], [1, SLOTS, NNZ]).astype(np.int64)
