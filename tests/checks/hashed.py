"""Hash tables among the tables of a `dmp.DistributedEmbedding`: what each rank does."""

import numpy as np
import tensorflow as tf

import sok_like as sok
import sok_like.dist_model_parallel as dmp
from sok_like.runtime.ranks import comm

STEPS = 4
KEYS = np.array([-(2**63), -5, 0, 3, 7, 11, 2**62, 2**63 - 1])
GIVEN = KEYS[2:]  # the others begin as ones
OPTIMIZERS = {
    "momentum": lambda: tf.keras.optimizers.SGD(0.02, momentum=0.9),
    "adagrad": lambda: tf.keras.optimizers.Adagrad(0.05),
    "adam": lambda: tf.keras.optimizers.Adam(0.02),
}
# How a model may be trained: which of the wrappers averages, and whether in a graph.
WAYS = {"momentum": ("tape", True), "adagrad": ("optimizer", False), "adam": ("wrapper", True)}


def make_layer(name, **kwargs):
    """A table cut over ranks, a replicated one, and a hash table with two inputs."""
    return dmp.DistributedEmbedding(
        [
            tf.keras.layers.Embedding(10, 4, name=f"{name}_cut"),
            sok.Embedding(3, 2, combiner="sum", name=f"{name}_whole"),
            sok.HashEmbedding(4, "mean", "ones", name=f"{name}_keys"),
        ],
        input_table_map=[0, 2, 1, 2],
        data_parallel_threshold=6,
        **kwargs,
    )


def values():
    rng = np.random.default_rng(5)
    cut, whole, rows = (rng.normal(size=s).astype(np.float32) for s in ((10, 4), (3, 2), (6, 4)))
    return [cut, whole, (GIVEN, rows)]


def batch(step, rank, world_size):
    """Ids of the four inputs, lists of lists; some ranks get no samples."""
    rng = np.random.default_rng([step, rank])
    size = [3, 0, 2][(step + rank) % 3] if world_size > 1 else 4
    return [
        rng.integers(0, 10, [size, 2]).tolist(),
        [rng.choice(KEYS, rng.integers(0, 4)).tolist() for _ in range(size)],
        rng.integers(0, 3, [size, 2]).tolist(),
        rng.choice(KEYS, [size, 1]).tolist(),
    ]


def tensors(step):
    current = comm.current()
    cut, ragged, whole, one = batch(step, current.rank, current.world_size)
    size = len(cut)
    return [
        tf.constant(np.reshape(cut, [size, 2]).astype(np.int32)),
        tf.RaggedTensor.from_row_lengths(
            tf.constant([k for keys in ragged for k in keys], tf.int64),
            tf.constant([len(keys) for keys in ragged], tf.int64),
        ),
        tf.constant(np.reshape(whole, [size, 2]).astype(np.int64)),
        tf.constant(np.reshape(one, [size, 1]).astype(np.int64)),
    ]


SIGNATURE = [
    tf.TensorSpec([None, 2], tf.int32),
    tf.RaggedTensorSpec([None, None], tf.int64, ragged_rank=1),
    tf.TensorSpec([None, 2], tf.int64),
    tf.TensorSpec([None, 1], tf.int64),
]


def loss_of(outputs):
    return tf.add_n([tf.reduce_sum((o - 0.5) ** 2 * (1.0 + i)) for i, o in enumerate(outputs)])


class Trainer:
    """A layer, its optimizer in one of three ways, and a step."""

    def __init__(self, name, optimizer):
        way, graph = WAYS[optimizer]
        self.layer, self.way = make_layer(f"{name}_{optimizer}"), way
        averages = way == "wrapper"
        stock = OPTIMIZERS[optimizer]()
        if way == "optimizer":
            self.optimizer = dmp.DistributedOptimizer(sok.OptimizerWrapper(stock))
        else:
            self.optimizer = sok.OptimizerWrapper(stock, average_dense_gradients=averages)
        self.step = tf.function(self._step, input_signature=SIGNATURE) if graph else self._step

    def _step(self, *inputs):
        with tf.GradientTape() as tape:
            outputs = self.layer(list(inputs), training=True)
            loss = loss_of(outputs)
        if self.way == "tape":
            tape = dmp.DistributedGradientTape(tape)
        variables = self.layer.trainable_variables
        gradients = tape.gradient(loss, variables)
        self.optimizer.apply_gradients(zip(gradients, variables, strict=True))
        return outputs

    def train(self, steps):
        return [[o.numpy() for o in self.step(*tensors(i))] for i in steps]


def train(optimizer):
    """All steps; then half of them, a copy by weights and state, and the rest."""
    whole, first, second = (Trainer(n, optimizer) for n in ("whole", "first", "second"))
    for trainer in (whole, first):
        trainer.layer.set_weights(values())
    outputs = whole.train(range(STEPS))
    for trainer in (first, second):  # not `whole`, whose step makes the state as it is traced
        trainer.layer.build()
        trainer.optimizer.build(trainer.layer.trainable_variables)
    first.train(range(2))
    weights = first.layer.get_weights(all_ranks=True)
    state = first.layer.get_optimizer_state(first.optimizer, all_ranks=True)
    second.layer.set_weights(weights)
    second.layer.set_optimizer_state(second.optimizer, state, chunk=3, use_lock=True)
    again = second.layer.get_optimizer_state(second.optimizer, all_ranks=True)
    second.train(range(2, STEPS))
    return {
        "outputs": outputs,
        "weights": whole.layer.get_weights(all_ranks=True),
        "resumed": second.layer.get_weights(all_ranks=True),
        "half": (weights, state),
        "again": again,
        "on_root": (
            len(first.layer.get_weights()),
            len(first.layer.get_optimizer_state(first.optimizer)),
        ),
        "local": [dmp.is_local(v) for v in whole.layer.trainable_variables],
    }


def evaluation():
    """Nothing is inserted, whether the flag is a bool or the phase of a model."""
    layer = make_layer("evaluated")
    cut, whole, (keys, rows) = values()
    layer.set_weights([cut, whole, (keys[:1], rows[:1])])
    inputs = tensors(0)
    size = lambda: len(layer.get_weights(all_ranks=True)[2][0])  # noqa: E731
    seen = [size()]
    found = [o.numpy() for o in layer(inputs, training=False)]
    tf.function(lambda *x: layer(list(x), training=False))(*inputs)
    seen.append(size())
    trained = [o.numpy() for o in layer(inputs, training=True)]
    seen.append(size())
    return seen, found, trained


def model_parallel():
    """Inputs for the global batch, each on one rank: outputs and updated tables."""
    current = comm.current()
    layer = make_layer("model_parallel", dp_input=False)
    layer.set_weights(values())
    parts = [batch(0, rank, 1) for rank in range(current.world_size)]
    joined = [[s for part in parts for s in part[i]] for i in range(4)]
    ragged = lambda x: tf.ragged.constant(x, dtype=tf.int64, ragged_rank=1)  # noqa: E731
    kinds = [tf.constant, ragged, tf.constant, lambda x: tf.constant(x, tf.int64)]
    inputs = [kinds[i](joined[i]) for i in layer.strategy.input_ids_list[current.rank]]
    optimizer = sok.OptimizerWrapper(tf.keras.optimizers.SGD(0.02))

    @tf.function
    def step(inputs):
        with tf.GradientTape() as tape:
            outputs = layer(inputs, training=True)
            loss = loss_of(outputs)
        return outputs, tape.gradient(loss, layer.trainable_variables)

    outputs, gradients = step(inputs)
    optimizer.apply_gradients(zip(gradients, layer.trainable_variables, strict=True))
    return [o.numpy() for o in outputs], layer.get_weights(all_ranks=True)


def failures():
    """The error on every rank when one rank has a wrong id or a full table; then all continue."""
    current, seen = comm.current(), {}
    last = current.rank == current.world_size - 1
    full = dmp.DistributedEmbedding(
        [sok.HashEmbedding(2, capacity=4, name="tiny"), sok.Embedding(9, 2)],
        data_parallel_threshold=18,
    )
    alone = dmp.DistributedEmbedding(
        [sok.Embedding(9, 2, name="alone")], data_parallel_threshold=18
    )
    fine = [tf.constant([[1, 2]]), tf.constant([[8]])]
    many = tf.range(100, 100 + 10 * current.world_size, dtype=tf.int64)[tf.newaxis]
    wrong = {
        "full": (full, [many, fine[1]]),
        "replicated": (full, [fine[0], tf.constant([[9 if last else 3]])]),
        "alone": (alone, [tf.constant([[-1 if last else 3]])]),
    }
    for name, (layer, inputs) in wrong.items():
        for graph in (False, True):
            call = tf.function(lambda *x, of=layer: of(list(x), training=True))
            call = call if graph else (lambda *x, of=layer: of(list(x), training=True))
            try:
                call(*inputs)
                seen[name, graph] = None
            except (tf.errors.InvalidArgumentError, tf.errors.ResourceExhaustedError) as error:
                seen[name, graph] = error.message
        layer(fine if layer is full else fine[1:])
    before = full.get_weights(all_ranks=True)
    rows = lambda n: np.zeros([n, 2], np.float32)  # noqa: E731
    bad = {
        "twice": ([1, 1], rows(2)),
        "rows": ([1, 2], rows(3)),
        "too_many": (np.arange(100), rows(100)),
        "dense": rows(2),
    }
    for name, pair in bad.items():
        try:
            full.set_weights([pair if last else before[0], before[1] * 0])
            seen[name] = None
        except ValueError as error:
            seen[name] = str(error)
    narrow = dmp.DistributedEmbedding([sok.HashEmbedding(2, key_dtype="int32", name="narrow")])
    narrow([tf.constant([2**40, 1])])  # rank 0 has the first key
    try:
        seen["narrow"] = narrow.get_weights()
    except (ValueError, tf.errors.InvalidArgumentError) as error:
        seen["narrow"] = str(error)
    after = full.get_weights(all_ranks=True)
    seen["kept"] = all(
        np.array_equal(a, b)
        for a, b in zip([*before[0], before[1]], [*after[0], after[1]], strict=True)
    )
    return seen


def constants():
    """A graph that knows the last rank's ids beforehand, and not those of the others."""
    current = comm.current()
    layer = dmp.DistributedEmbedding([sok.HashEmbedding(2, None, "ones", name="constant")])
    layer.build()
    known = tf.zeros([0, 1], tf.int64)

    @tf.function
    def step(ids):
        with tf.GradientTape() as tape:
            (found,) = layer([known if current.rank == current.world_size - 1 else ids])
            loss = tf.reduce_sum(found)
        (gradient,) = tape.gradient(loss, layer.trainable_variables)
        return found, gradient.indices, gradient.values

    found, keys, gradients = step(tf.constant([[4], [5]], tf.int64))
    return found.shape[0], dict(zip(keys.numpy().tolist(), gradients.numpy().tolist(), strict=True))


def unused_table():
    """A rank of which the only table has no input takes part in the exchange of gradients."""
    tables = [sok.Embedding(3, 1), sok.Embedding(3, 1)]
    layer = dmp.DistributedEmbedding(tables, input_table_map=[0])
    with tf.GradientTape() as tape:
        (found,) = layer([tf.constant([[2]])])
        loss = tf.reduce_sum(found)
    gradients = tape.gradient(loss, layer.trainable_variables)
    return [tf.convert_to_tensor(g).numpy().ravel().tolist() for g in gradients if g is not None]


def alone():
    """The layer by itself, trained in a model by compile and fit."""
    keys = tf.keras.Input([2], dtype="int64")
    layer = sok.HashEmbedding(3, "sqrtn", "ones", name="by_itself")
    output = tf.keras.layers.Dense(1, kernel_initializer="ones")(layer(keys))
    model = tf.keras.Model(keys, output)
    optimizer = dmp.DistributedOptimizer(sok.OptimizerWrapper(tf.keras.optimizers.Adam(0.05)))
    model.compile(optimizer, "mse", jit_compile=False)
    x, y = fit_data(comm.current().rank)
    data = tf.data.Dataset.from_tensor_slices((x, y)).batch(4, drop_remainder=True)
    callback = dmp.BroadcastGlobalVariablesCallback(0)
    model.fit(data, epochs=2, verbose=0, callbacks=[callback])
    model.predict(np.full([1, 2], 12345), verbose=0)
    keys, rows = sok.export(layer.table)
    return keys.numpy(), rows.numpy(), model.layers[-1].get_weights()


def fit_data(rank):
    rng = np.random.default_rng([21, rank])
    return rng.choice(KEYS, [8, 2]), rng.normal(size=[8, 1]).astype(np.float32)
