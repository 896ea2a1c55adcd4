"""Which rank holds which rows, bit for bit: initial rows, assign and export, collectives."""

import re

import ml_dtypes
import numpy as np
import tensorflow as tf

KEYS = np.array([0, 1, 2, 3, -1, -2, 7, 2**40 + 5, -(2**63), 2**63 - 1, 11, 12], np.int64)
KEY_DTYPES = {
    "int64": KEYS,
    "int32": np.array([0, 5, -1, -(2**31), 2**31 - 1, 8], np.int32),
    "uint64": np.array([0, 5, 2**64 - 1, 2**63, 2**63 + 5, 8], np.uint64),
    "uint32": np.array([0, 5, 2**32 - 1, 2**31, 8, 9], np.uint32),
}
ROW_DTYPES = {"bfloat16": ml_dtypes.bfloat16, "float16": np.float16}
INITIALIZERS = ("random_uniform", "random_normal", "truncated_normal", "glorot_uniform", "ones")


def checks(world_size):
    every = {
        **{f"assign_{dtype}": lambda d=dtype: assign_export(d) for dtype in KEY_DTYPES},
        "initial_rows": initial_rows,
        "collectives": collectives,
        "seeds": seeds,
        "tables_of_one_name": tables_of_one_name,
    }
    if world_size <= 2:
        every["train_again"] = train_again
    if world_size == 2:
        every["collectives_of_a_step"] = collectives_of_a_step
        every["rows_of_16_bits"] = rows_of_16_bits
    return every


def _rank_and_size():
    from sok_like.runtime.ranks import comm

    return comm.current().rank, comm.current().world_size


def initial_rows():
    """Rows of KEYS for each initializer: read, then inserted in an order of each rank's own."""
    import sok_like as sok

    rank, _ = _rank_and_size()
    results = {}
    for initializer in INITIALIZERS:
        layer = sok.All2AllDenseEmbedding(
            None, 5, 1, 1, dynamic_input=True, embedding_initializer=initializer, name="fresh"
        )
        read = layer(tf.constant(KEYS), training=False).numpy()
        order = np.random.default_rng(rank).permutation(len(KEYS))
        for part in np.array_split(order, 3):
            layer(tf.constant(KEYS[part]), training=True)
        after = layer(tf.constant(KEYS), training=False).numpy()
        keys, rows = (t.numpy() for t in sok.export(layer.embedding_variable))
        results[initializer] = {"read": read, "after": after, "exported": (keys, rows)}
    return results


def rows_of_16_bits():
    """By dtype, what the rank exports after steps in which each key is looked up by one rank."""
    import sok_like as sok

    rank, world_size = _rank_and_size()
    exported = {}
    for dtype in ROW_DTYPES:
        layer = sok.All2AllDenseEmbedding(
            *(None, 5, 1, 1, True), name=f"rows_{dtype}", row_dtype=dtype, gradient_scale="sum"
        )
        variable = layer.embedding_variable
        optimizer = sok.OptimizerWrapper(tf.keras.optimizers.Adagrad(0.1))
        for step in range(4):
            weights = np.random.default_rng(step).normal(size=[len(KEYS), 5]).astype(np.float32)
            mine = np.arange(len(KEYS)) % world_size == (rank + step) % world_size
            with tf.GradientTape() as tape:
                loss = tf.reduce_sum(layer(tf.constant(KEYS[mine])) * weights[mine])
            optimizer.apply_gradients([(tape.gradient(loss, variable), variable)])
        keys, rows = (t.numpy() for t in sok.export(variable))
        exported[dtype] = dict(zip(keys.tolist(), rows.tolist(), strict=True))
    return exported


def assign_export(dtype):
    """The same full list assigned on all ranks; what each then exports, and what all look up."""
    import sok_like as sok

    keys = KEY_DTYPES[dtype]
    rows = np.arange(len(keys) * 3, dtype=np.float32).reshape(-1, 3)
    layer = sok.All2AllDenseEmbedding(
        None, 3, 1, 1, dynamic_input=True, key_dtype=dtype, name=f"assigned_{dtype}"
    )
    sok.assign(layer.embedding_variable, keys, rows)
    exported = [t.numpy() for t in sok.export(layer.embedding_variable)]
    return {"exported": exported, "found": layer(tf.constant(keys), training=False).numpy()}


def collectives():
    from sok_like.runtime.ranks import comm

    communicator = comm.current()
    rank, world_size = communicator.rank, communicator.world_size
    splits = tf.range(world_size) + rank  # r + rank items to rank r
    sent = tf.range(int(tf.reduce_sum(splits)), dtype=tf.float32) + 100 * rank
    received, lengths = communicator.all_to_all(sent, splits, "check")
    average = communicator.average(
        [
            tf.constant([1.0, 2.0]) * (rank + 1),
            None,
            tf.IndexedSlices(tf.fill([1, 2], rank + 1.0), tf.constant([rank])),
        ],
        "check_average",
    )
    # Rank 0 alone, the others together.
    group = communicator.subset([[0], list(range(1, world_size))] if world_size > 1 else [[0]])
    return {
        "sum": communicator.sum(tf.fill([2], rank + 1.0), "sum").numpy(),
        "scattered": communicator.reduce_scatter(tf.range(5.0) * (rank + 1), "scatter").numpy(),
        "group": (group.rank, group.world_size, group.sum(tf.constant(rank), "group").numpy()),
        "everyone": communicator.subset([list(range(world_size))]) is communicator,
        "received": received.numpy(),
        "lengths": lengths.numpy(),
        "dense": average[0].numpy(),
        "none": average[1],
        "sparse": (average[2].values.numpy(), average[2].indices.numpy()),
        "root": communicator.broadcast(tf.constant([rank * 10]), world_size - 1, "root").numpy(),
        "gathered": communicator.all_gather(tf.fill([rank + 1], rank), "gather").numpy(),
        "barrier": communicator.barrier(),
    }


def train_again():
    """The whole outcome of a training, once more."""
    from tests.checks import parity

    return parity.train(*parity.TWICE)


def seeds():
    """Initial rows after an Init with a seed of each rank's own, and two Inits without a seed."""
    import sok_like as sok
    from sok_like.runtime.ranks import initialize
    from tests.checks.parity import SEED

    rank, _ = _rank_and_size()
    rows = []
    for seed in (100 + rank, None, None):
        initialize.reset()
        sok.Init(global_batch_size=12, seed=seed)
        layer = sok.All2AllDenseEmbedding(None, 5, 1, 1, dynamic_input=True, name="seeded")
        rows.append(layer(tf.constant(KEYS), training=False).numpy())
    initialize.reset()
    sok.Init(global_batch_size=12, seed=SEED)
    return rows


def tables_of_one_name():
    """Two layers of one name in one step: what each table holds, and what each layer found."""
    import sok_like as sok

    layers = [
        sok.All2AllDenseEmbedding(
            None, 2, 1, 1, dynamic_input=True, embedding_initializer="zeros", name="twin"
        )
        for _ in range(2)
    ]
    for i, layer in enumerate(layers):
        sok.assign(layer.embedding_variable, KEYS, np.full([len(KEYS), 2], i + 1.0))

    @tf.function
    def both(keys):
        return [layer(keys, training=False) for layer in layers]

    return [found.numpy() for found in both(tf.constant(KEYS[:5]))]


def collectives_of_a_step():
    """Exchanges in the graph of a lookup in three tables, and with its gradient."""
    import sok_like as sok
    from sok_like.lookup.hash_lookup import HashFeature, lookup

    tables = [sok.EmbeddingVariable(dim, name=f"group{dim}") for dim in (2, 3, 5)]

    def forward(keys):
        return lookup([HashFeature(t, keys) for t in tables], training=True, name="group")

    def step(keys):
        with tf.GradientTape() as tape:
            loss = tf.add_n([tf.reduce_sum(rows) for rows in forward(keys)])
        return tape.gradient(loss, tables)

    return {"forward": exchanges(forward), "step": exchanges(step)}


def exchanges(function):
    """Exchanges in the graph of a function of int64 keys `[num_keys]`.

    Not those in loops, which run for messages beyond the transport's limit only.
    """
    graph = tf.function(function).get_concrete_function(tf.TensorSpec([None], tf.int64)).graph
    functions = [f for f in graph._functions.values() if hasattr(f, "graph")]
    bodies = r"while_(\d+_)?body"
    graphs = [graph, *(f.graph for f in functions if not re.search(bodies, f.graph.name))]
    nodes = {op.name for g in graphs for op in g.get_operations() if op.type == "SokCheckMessage"}
    return len(nodes)
