"""Tables, inputs and batches of the tests of `dmp.DistributedEmbedding`, and their dense oracle.

The oracle is one process with stock layers only: the table is the kernel of a `Dense` layer, and
an input the matrix that says how often each row counts in each row of the output. A hash table has
one row there for each of its keys.
"""

import dataclasses

import numpy as np
import tensorflow as tf

import sok_like as sok
import sok_like.dist_model_parallel as dmp
from sok_like.runtime.ranks import comm

STEPS = 3
KEYS = np.array([-(2**63), -5, 0, 3, 7, 11, 2**62, 2**63 - 1])  # of hash tables
GIVEN = KEYS[2:]  # those of which the rows are set; the others begin as ones
HASH_TABLE = (len(KEYS), 4, "mean")
TABLES = [(10, 4, None), (7, 8, "sum"), (5, 4, "mean"), (20, 4, None), (2, 6, "sum")]
# Input: table, kind, dtype, hotness (most ids of a sample where it varies).
INPUTS = [
    (0, "dense", "int32", 1),
    (1, "ragged", "int64", 4),
    (2, "sparse", "int64", 3),
    (3, "dense", "int64", 3),
    (4, "dense", "int32", 2),
    (0, "ragged", "int32", 3),
    (3, "flat", "int64", 1),
    (0, "sparse", "int64", 2),
]
OPTIMIZERS = {
    "sgd": lambda: tf.keras.optimizers.SGD(0.005),
    "adagrad": lambda: tf.keras.optimizers.Adagrad(0.05),
    "adam": lambda: tf.keras.optimizers.Adam(0.02),
    "momentum": lambda: tf.keras.optimizers.SGD(0.005, momentum=0.9),
}


@dataclasses.dataclass(frozen=True)
class Case:
    arguments: dict
    tables: list = dataclasses.field(default_factory=lambda: TABLES)
    inputs: list = dataclasses.field(default_factory=lambda: INPUTS)


OF_TWO_ROWS = [(2, 3, "mean")], [(0, "dense", "int64", 2)]
# A table that is cut, a replicated one, and a hash table with two inputs.
WITH_HASH_TABLE = (
    [(10, 4, None), (3, 2, "sum"), HASH_TABLE],
    [
        (0, "dense", "int32", 2),
        (2, "ragged", "int64", 3),
        (1, "dense", "int64", 2),
        (2, "dense", "int64", 1),
    ],
)
MIXED = {
    "strategy": "memory_optimized",
    "column_slice_threshold": 30,
    "row_slice_threshold": 80,
    "data_parallel_threshold": 20,
}
CASES = {
    "basic": Case({}),
    "rows": Case({"row_slice_threshold": 1}),
    "mixed": Case(MIXED),
    "replicated": Case({"data_parallel_threshold": 10**6}),
    # On three ranks one has a table without an input, and one has none.
    "idle_ranks": Case({}, [(3, 1, "sum"), (3, 1, "sum")], [(0, "ragged", "int64", 3)]),
    "fewer_rows_than_ranks": Case({"row_slice_threshold": 1}, *OF_TWO_ROWS),
    "hashed": Case({"data_parallel_threshold": 6}, *WITH_HASH_TABLE),
}


def table_values(case):
    """What `set_weights` takes; of a hash table a pair of keys and rows."""
    rng = np.random.default_rng(3)
    found = [rng.normal(size=table[:2]).astype(np.float32) for table in case.tables]
    is_hash_table = [table == HASH_TABLE for table in case.tables]
    return [
        (GIVEN, rows[2:]) if has_keys else rows
        for rows, has_keys in zip(found, is_hash_table, strict=True)
    ]


def as_dense(weights):
    """A table's weights; of a hash table one row per key of KEYS."""
    if not isinstance(weights, tuple):
        return weights
    rows = np.ones([len(KEYS), HASH_TABLE[1]], np.float32)
    for key, row in zip(*weights, strict=True):
        rows[KEYS.tolist().index(key)] = row
    return rows


def make_embedding(table):
    rows, dim, combiner = table
    if table == HASH_TABLE:
        return sok.HashEmbedding(dim, combiner, "ones")
    # Stock embeddings for tables without a combiner, so that both kinds are in one list.
    if combiner is None:
        return tf.keras.layers.Embedding(rows, dim)
    return sok.Embedding(rows, dim, combiner=combiner)


def make_layer(case):
    embeddings = [make_embedding(table) for table in case.tables]
    input_map = [table for table, *_ in case.inputs]
    return dmp.DistributedEmbedding(embeddings, input_table_map=input_map, **case.arguments)


def batch(case, step, rank, world_size):
    """Row numbers of a rank's samples: lists of lists, one per input. Some ranks get none."""
    rng = np.random.default_rng([step, rank])
    is_even = world_size == 1 or not case.arguments.get("dp_input", True)
    size = 4 if is_even else [3, 0, 2][(step + rank) % 3]
    ids = []
    for table, kind, _, hotness in case.inputs:
        fixed = kind in ("dense", "flat")
        lengths = [hotness if fixed else int(rng.integers(0, hotness + 1)) for _ in range(size)]
        ids.append([rng.integers(0, case.tables[table][0], n).tolist() for n in lengths])
    return ids


def as_tensor(case, number, samples):
    """An input as the layer takes it: ids, or keys of a hash table."""
    table, kind, dtype, hotness = case.inputs[number]
    if case.tables[table] is HASH_TABLE:
        samples = [KEYS[np.array(sample, int)] for sample in samples]
    return tensor_of(kind, samples, dtype, hotness)


def tensor_of(kind, samples, dtype, hotness):
    """Ids or weights, lists by sample."""
    if kind in ("ragged", "sparse"):
        values = tf.constant([x for sample in samples for x in sample], dtype)
        lengths = tf.constant([len(sample) for sample in samples], tf.int64)
        ragged = tf.RaggedTensor.from_row_lengths(values, lengths)
        if kind == "ragged":
            return ragged
        return tf.SparseTensor(ragged.to_sparse().indices, values, [len(samples), hotness])
    dense = np.reshape(samples, [len(samples), hotness])
    return tf.constant(dense[:, 0] if kind == "flat" else dense, dtype)


def tensors(case, step):
    """The inputs of this rank."""
    current = comm.current()
    ids = batch(case, step, current.rank, current.world_size)
    return [as_tensor(case, i, samples) for i, samples in enumerate(ids)]


def spec(kind, dtype, hotness):
    dtype = tf.as_dtype(dtype)
    if kind == "ragged":
        return tf.RaggedTensorSpec([None, None], dtype, ragged_rank=1)
    if kind == "sparse":
        return tf.SparseTensorSpec([None, None], dtype)
    return tf.TensorSpec([None] if kind == "flat" else [None, hotness], dtype)


def counts(samples, num_rows, combiner):
    """How often each row of the table counts in each row of the (flat) output."""
    groups = [[x] for s in samples for x in s] if combiner is None else samples
    matrix = np.zeros([len(groups), num_rows], np.float32)
    for i, group in enumerate(groups):
        for x in group:
            matrix[i, x] += 1 / len(group) if combiner == "mean" else 1
    return matrix


def flat(output):
    """Rows of an output of any shape: `[n, dim]`."""
    if isinstance(output, tf.RaggedTensor):
        output = output.flat_values
    return tf.reshape(output, [-1, output.shape[-1]])


def assert_same(found, right, atol=0.0):
    """Of weights or a state: lists, dictionaries and pairs of arrays."""
    tf.nest.assert_same_structure(found, right)
    for ours, theirs in zip(tf.nest.flatten(found), tf.nest.flatten(right), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=0, atol=atol)


def make_heads(case):
    """One small dense layer per input."""
    heads = []
    for i, (table, *_) in enumerate(case.inputs):
        dim = case.tables[table][1]
        head = tf.keras.layers.Dense(1, use_bias=False)
        head.build([None, dim])
        head.set_weights([np.linspace(-1, 1, dim, dtype=np.float32)[:, None] + 0.1 * i])
        heads.append(head)
    return heads


def loss_of(outputs, heads):
    return tf.add_n(
        [tf.reduce_sum((h(flat(o)) - 1.0) ** 2) for o, h in zip(outputs, heads, strict=True)]
    )


class Trainer:
    """A layer with heads behind it, and steps of an optimizer.

    Gradients are averaged by the tape, by DMP's optimizer, or by the wrapper that hash tables need.
    """

    def __init__(self, case, optimizer, graph, by):
        self.case, self.layer, self.heads = case, make_layer(case), make_heads(case)
        self.layer.set_weights(table_values(case))
        self.by, self.optimizer = by, OPTIMIZERS[optimizer]()
        if HASH_TABLE in case.tables:
            average = by == "wrapper"
            self.optimizer = sok.OptimizerWrapper(self.optimizer, average_dense_gradients=average)
        if by == "optimizer":
            self.optimizer = dmp.DistributedOptimizer(self.optimizer)
        heads = [head.trainable_variables[0] for head in self.heads]
        self.variables = [*self.layer.trainable_variables, *heads]
        if optimizer != "adam":  # which makes its state as the first step is traced: traces twice
            self.optimizer.build(self.variables)
        signature = [spec(*of_input) for _, *of_input in case.inputs]
        self.step = tf.function(self._step, input_signature=signature) if graph else self._step

    def _step(self, *inputs):
        with tf.GradientTape() as tape:
            outputs = self.layer(list(inputs), training=True)
            loss = loss_of(outputs, self.heads)
        tape = dmp.DistributedGradientTape(tape) if self.by == "tape" else tape
        gradients = tape.gradient(loss, self.variables)
        self.optimizer.apply_gradients(zip(gradients, self.variables, strict=True))
        return outputs

    def train(self, steps=range(STEPS)):
        return [self.step(*tensors(self.case, step)) for step in steps]


def oracle(case, optimizer, world_size, steps=STEPS):
    """Per step each rank's outputs, flat; then the tables and heads after the last step."""
    tables = []
    for value in map(as_dense, table_values(case)):
        layer = tf.keras.layers.Dense(value.shape[1], use_bias=False)
        layer.build([None, value.shape[0]])
        layer.set_weights([value])
        tables.append(layer)
    heads, opt, outputs = make_heads(case), OPTIMIZERS[optimizer](), []
    variables = [layer.trainable_variables[0] for layer in (*tables, *heads)]
    for step in range(steps):
        with tf.GradientTape() as tape:
            losses, of_step = [], []
            for rank in range(world_size):
                found = []
                ids = batch(case, step, rank, world_size)
                for (t, *_), samples in zip(case.inputs, ids, strict=True):
                    rows, _, combiner = case.tables[t]
                    found.append(tables[t](counts(samples, rows, combiner)))
                losses.append(loss_of(found, heads))
                of_step.append([o.numpy() for o in found])
            loss = tf.add_n(losses) / world_size
        opt.apply_gradients(zip(tape.gradient(loss, variables), variables, strict=True))
        outputs.append(of_step)
    return {
        "outputs": outputs,
        "tables": [layer.get_weights()[0] for layer in tables],
        "heads": [layer.get_weights()[0] for layer in heads],
    }
