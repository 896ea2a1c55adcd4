"""Group lookups on ranks: trainings against dense tables, placement, collectives, the switch.

The group of a training has EmbeddingVariables of equal and other widths, each combiner, weights, a
shared table and a tf.Variable that is used twice.
"""

import warnings

import numpy as np
import tensorflow as tf

from tests.checks.parity import RATE, SEED, ranks_of

NUM_KEYS, STEPS, BATCH, MAX_HOTNESS = 20, 12, 9, 3
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
        last = NUM_KEYS - 4 + step // 10  # some keys come late, one never
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
    keras = tf.keras.optimizers
    return {
        "adagrad": lambda: keras.Adagrad(RATE),
        "adam": lambda: keras.Adam(RATE),
        "ftrl": lambda: keras.Ftrl(RATE, l1_regularization_strength=0.01, beta=0.1),
    }[name]()


# ---- with sok ----


def make_tables():
    import sok_like as sok

    return {
        name: tf.Variable(initial_rows(name), name=name)
        if name in DENSE
        else sok.EmbeddingVariable(dim, name=f"group_{name}")
        for name, dim in DIMS.items()
    }


def train(optimizer_name):
    """Trains on this rank's samples; the outputs of every step, and the rows before and after."""
    import sok_like as sok
    from sok_like.runtime.ranks import comm

    rank, world_size = comm.current().rank, comm.current().world_size
    tables = make_tables()
    variables = list(tables.values())
    optimizer = sok.OptimizerWrapper(keras_optimizer(optimizer_name))
    optimizer.build(variables)

    def ids_and_weights(feature, ids, lengths, weights):
        _, _, weighted, kind = feature
        ids = tf.RaggedTensor.from_tensor(ids, lengths)
        weights = tf.RaggedTensor.from_tensor(weights, lengths)
        if kind == "sparse":
            ids, weights = ids.to_sparse(), weights.to_sparse()
        return ids, weights if weighted else None

    specs = [
        (
            tf.TensorSpec([None, MAX_HOTNESS], tf.int64),
            tf.TensorSpec([None], tf.int64),
            tf.TensorSpec([None, MAX_HOTNESS], tf.float32),
        )
        for _ in FEATURES
    ]

    @tf.function(autograph=False, input_signature=[specs, tf.TensorSpec([None])])
    def step(features, targets):
        pairs = [ids_and_weights(*item) for item in _with_feature(features)]
        ids, weights = zip(*pairs, strict=True)
        with tf.GradientTape() as tape:
            found = sok.group_embedding_lookup_sparse(
                [tables[name] for name, _, _, _ in FEATURES],
                ids,
                [combiner for _, combiner, _, _ in FEATURES],
                sp_weights=weights,
                name=f"train_{optimizer_name}",
            )
            loss = loss_of(found, targets)
        gradients = tape.gradient(loss, variables)
        optimizer.apply_gradients(zip(gradients, variables, strict=True))
        return found

    def read_all():
        every = [np.arange(NUM_KEYS) if name in DENSE else keys() for name in tables]
        rows = sok.group_embedding_lookup(variables, every, training=False)
        return {name: row.numpy() for name, row in zip(tables, rows, strict=True)}

    initial, vectors = read_all(), []
    for number, (features, targets) in enumerate(batches()):
        mine = ranks_of(number, BATCH, world_size) == rank
        own = [
            (p[mine] if f[0] in DENSE else keys()[p[mine]], lengths[mine], w[mine])
            for f, p, lengths, w in _with_feature(features)
        ]
        vectors.append([v.numpy() for v in step(own, targets[mine])])
    return {"initial": initial, "vectors": vectors, "final": read_all()}


def _with_feature(features):
    return [(feature, *arrays) for feature, arrays in zip(FEATURES, features, strict=True)]


def placement():
    """Keys on this rank of a table that was looked up alone, and of others in a group of 7."""
    import sok_like as sok

    tables = [sok.EmbeddingVariable(2, name=f"placed{i}") for i in range(8)]
    sok.group_embedding_lookup([tables[0]], [keys()])
    sok.group_embedding_lookup(tables[1:], [keys()] * 7)
    return [sok.export(table)[0].numpy() for table in tables]


def sequences():
    """`[batch, T, dim]` of rows `key position, key position + 0.5`."""
    import sok_like as sok

    table = sok.EmbeddingVariable(2, name="sequences")
    rows = np.arange(NUM_KEYS, dtype=np.float32)[:, None] + [0, 0.5]
    sok.assign(table, keys(), rows)
    ids = tf.RaggedTensor.from_row_lengths(keys()[:6], [1, 0, 3, 2])
    empty = tf.ragged.constant([[], []], dtype=tf.int64, ragged_rank=1)
    found = sok.group_embedding_lookup_sparse(
        [table, table, table], [ids, ids.to_sparse(), empty], "sum", is_sequence=True
    )
    return [f.numpy() for f in found]


def packed():
    """Embeddings and gradients of this rank's samples: of a list, and of one RaggedTensor."""
    import sok_like as sok
    from sok_like.runtime.ranks import comm

    rank = comm.current().rank
    tables = [sok.EmbeddingVariable(2 + i, name=f"packed{i}") for i in range(3)]
    rng = np.random.default_rng([8, rank])
    lists = [
        tf.RaggedTensor.from_row_lengths(rng.choice(keys(), 6), lengths)
        for lengths in ([1, 0, 5], [2, 2, 2], [6 - rank, rank])
    ]
    weights = [i.with_values(rng.random(6).astype(np.float32)) for i in lists]
    found = []
    for ids, of_ids in ((lists, weights), (tf.ragged.stack(lists), tf.ragged.stack(weights))):
        with tf.GradientTape() as tape:
            rows = sok.group_embedding_lookup_sparse(
                tables, ids, "mean", sp_weights=of_ids, gradient_scale="sum"
            )
            loss = tf.add_n([tf.reduce_sum(r * r) for r in rows])
        slices = tape.gradient(loss, tables)
        found.append([*rows, *(g.values for g in slices), *(g.indices for g in slices)])
    return [[t.numpy() for t in one] for one in found]


LEARNED = [[2, 4, 2], [], [7, 7], [1, 0, 6]]  # positions of keys, by sample


def learned(rank):
    """Rows of all keys, and a rank's weights and factors of its outputs."""
    rows = np.random.default_rng(9).normal(size=[NUM_KEYS, 3]).astype(np.float32)
    rng = np.random.default_rng([9, rank])
    weights = rng.uniform(0.5, 2.0, sum(map(len, LEARNED))).astype(np.float32)
    return rows, weights, rng.normal(size=[len(LEARNED), 3]).astype(np.float32)


def learned_weights():
    """Gradients of a rank's weights by combiner and table; and where rank 0 alone asks for them."""
    import sok_like as sok
    from sok_like import sok2
    from sok_like.runtime.ranks import comm

    rank = comm.current().rank
    rows, flat, factors = learned(rank)
    table = sok.EmbeddingVariable(3, name="learned")
    sok.assign(table, keys(), rows)
    static = [sok2.Variable(rows, name="static"), sok2.Variable(rows, mode="localized:0")]
    positions = tf.ragged.constant(LEARNED, dtype=tf.int64)
    ids = positions.with_values(tf.gather(keys(), positions.values))

    def step(weights, combiner):
        outputs = sok.group_embedding_lookup_sparse(
            [table, table],
            [ids, ids.to_sparse()],
            combiner,
            sp_weights=[ids.with_values(weights), ids.with_values(weights).to_sparse()],
            gradient_scale="sum",
        )
        of_static = positions.with_values(weights)
        outputs += sok2.lookup_sparse(static, [positions] * 2, [of_static] * 2, [combiner] * 2)
        return [tf.reduce_sum(output * factors) for output in outputs]

    found = {}
    for combiner in ("sum", "mean", "sqrtn"):
        weights = tf.Variable(flat, name="local")
        with tf.GradientTape(persistent=True) as tape:
            losses = step(weights, combiner)
        found[combiner] = [tape.gradient(loss, weights).numpy() for loss in losses]
    weights = tf.constant(flat)
    for one in (step, tf.function(step, autograph=False)):
        with tf.GradientTape() as tape:
            if rank == 0:
                tape.watch(weights)
            loss = one(weights, "mean")[0]
        of_table, alone = tape.gradient(loss, [table, weights])
        assert of_table.values.shape[1] == 3
    return found, None if alone is None else alone.numpy()


def uneven_owners():
    """Warnings of lookups in small batches, eagerly and in a function."""
    import sok_like as sok

    table = sok.EmbeddingVariable(2, name="uneven")

    def look_up(ids):
        return sok.group_embedding_lookup([table], [ids], training=True)

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for one in (look_up, tf.function(look_up, autograph=False)):
            for start in range(0, 2000, 100):
                one(tf.range(start, start + 100, dtype=tf.int64) * 10**15)
    return [str(w.message) for w in caught if "times the mean" in str(w.message)]


def gradient_scales():
    """Gradients of this rank's rows where every rank's loss is their sum, by scale and lookup."""
    import sok_like as sok

    table = sok.EmbeddingVariable(1, name="scaled")
    ids = tf.RaggedTensor.from_row_lengths(keys(), [NUM_KEYS])
    found = {}
    for scale in ("sum", "mean"):
        for name, lookup in (
            (
                "sparse",
                lambda s: sok.group_embedding_lookup_sparse(
                    [table], [ids], "sum", gradient_scale=s
                ),
            ),
            ("dense", lambda s: sok.group_embedding_lookup([table], [keys()], gradient_scale=s)),
            (
                "sequence",
                lambda s: sok.group_embedding_lookup_sparse(
                    [table], [ids], "sum", is_sequence=True, gradient_scale=s
                ),
            ),
        ):
            with tf.GradientTape() as tape:
                loss = tf.reduce_sum(lookup(scale)[0])
            found[scale, name] = tape.gradient(loss, table).values.numpy()
    return found


def reference_variables():
    """Rows of a table and of a reference variable, of one group, before and after a step."""
    import sok_like as sok
    from sok_like.runtime.ranks import comm

    v1 = tf.compat.v1
    rank = comm.current().rank
    with tf.Graph().as_default(), v1.Session() as session:
        ones = v1.ones_initializer()
        dense = v1.get_variable("dense", [4, 2], initializer=ones, use_resource=False)
        table = sok.EmbeddingVariable(2, name="beside_references", initializer="ones")
        ids = tf.RaggedTensor.from_row_lengths(tf.constant([rank, 3], tf.int64), [2])
        rows = sok.group_embedding_lookup_sparse(
            [table, dense], [ids, ids], "sum", gradient_scale="sum"
        )
        optimizer = sok.OptimizerWrapper(v1.train.GradientDescentOptimizer(0.5))
        train = optimizer.minimize(tf.add_n([tf.reduce_sum(r) for r in rows]))
        session.run(v1.global_variables_initializer())
        session.run(train)
        every = tf.nn.embedding_lookup(table, tf.range(4, dtype=tf.int64))
        return type(dense).__name__, session.run(every), session.run(dense)


def strategy():
    """What the switch does in a fresh program: world sizes, and errors of what it refuses."""
    import sok_like as sok
    from sok_like.runtime.ranks import comm, initialize

    def outcome(choice):
        initialize.reset()
        try:
            sok.enable_distributed_strategy(choice)
        except RuntimeError as error:
            return str(error)
        table = sok.EmbeddingVariable(3, name="switched")
        (rows,) = sok.group_embedding_lookup([table], [keys()], training=False)
        return comm.current().world_size, rows.numpy()

    found = {choice: outcome(choice) for choice in ("collective", "localized", None)}
    initialize.reset()
    with tf.Graph().as_default():
        sok.enable_distributed_strategy()
        found["graph"] = comm.current().world_size
    initialize.reset()
    sok.Init(global_batch_size=12, seed=SEED)
    return found


def collectives():
    """Exchanges in the graph of groups of 1 and 12 tables, and with their gradients."""
    import sok_like as sok
    from tests.thread_ranks import exchanges_in

    counts = {}
    for num_tables in (1, 12):
        tables = [sok.EmbeddingVariable(2 + i % 3, name=f"counted{i}") for i in range(num_tables)]
        params = [*tables, tf.Variable(tf.ones([4, 2])), tables[0]]

        def forward(keys, params=params):
            ids = tf.RaggedTensor.from_row_lengths(keys, [1, 1])
            return sok.group_embedding_lookup_sparse(params, [ids] * len(params), "mean")

        def step(keys, forward=forward, tables=tables):
            with tf.GradientTape() as tape:
                loss = tf.add_n([tf.reduce_sum(rows) for rows in forward(keys)])
            return tape.gradient(loss, tables)

        counts[num_tables] = exchanges_in(forward), exchanges_in(step)
    return counts
