"""`dmp.DistributedEmbedding` on ranks against stock layers on one process."""

import numpy as np
import pytest
import tensorflow as tf

import sok_like as sok
import sok_like.dist_model_parallel as dmp
from sok_like.runtime.ranks import comm
from sok_like.table.variable import is_embedding_variable
from tests.dist_model_parallel import cases
from tests.dist_model_parallel.cases import make_layer

pytestmark = pytest.mark.keras

# Ranks, placement, optimizer, whether steps are a function, and who averages gradients.
TRAININGS = [
    (1, "basic", "sgd", True, "optimizer"),
    (1, "mixed", "adam", False, "tape"),
    (2, "mixed", "adagrad", True, "tape"),
    (3, "basic", "adam", False, "tape"),
    (3, "rows", "adagrad", False, "optimizer"),
    (3, "replicated", "adam", False, "optimizer"),
    (3, "idle_ranks", "adam", False, "tape"),
    (3, "fewer_rows_than_ranks", "sgd", True, "optimizer"),
    (1, "hashed", "adagrad", False, "optimizer"),
    (3, "hashed", "adam", True, "wrapper"),
    (4, "hashed", "momentum", False, "tape"),  # one rank owns no key
]


def train(case, optimizer, graph, by):
    trainer = cases.Trainer(case, optimizer, graph, by)
    outputs = trainer.train()
    layer = trainer.layer
    ordinary = [v for v in layer.trainable_variables if not is_embedding_variable(v)]
    return {
        "outputs": [[cases.flat(o).numpy() for o in found] for found in outputs],
        "shapes": [
            ["ragged" if isinstance(o, tf.RaggedTensor) else tuple(o.shape) for o in found]
            for found in outputs
        ],
        "tables": list(map(cases.as_dense, layer.get_weights(all_ranks=True))),
        "on_root": len(layer.get_weights()),
        "heads": [head.get_weights()[0] for head in trainer.heads],
        "elements": sum(int(np.prod(v.shape)) for v in ordinary),
    }


def check_outputs(outputs, expected):
    for step, (of_step, right_of_step) in enumerate(zip(outputs, expected, strict=True)):
        for found, right in zip(of_step, right_of_step, strict=True):
            atol = 1e-6 if step == 0 else 1e-5
            np.testing.assert_allclose(cases.flat(found), right, rtol=1e-6, atol=atol)


@pytest.mark.parametrize("world_size, name, optimizer, graph, by", TRAININGS)
def test_training(on_threads, world_size, name, optimizer, graph, by):
    case = cases.CASES[name]
    ranks = on_threads(world_size, train, case, optimizer, graph, by)
    expected = cases.oracle(case, optimizer, world_size)
    for rank, result in enumerate(ranks):
        check_outputs(result["outputs"], [of_step[rank] for of_step in expected["outputs"]])
        if name == "basic":
            for step, shapes in enumerate(result["shapes"]):
                batch = len(cases.batch(case, step, rank, world_size)[0])
                assert shapes == [
                    (batch, 1, 4), (batch, 8), (batch, 4), (batch, 3, 4), (batch, 6),
                    "ragged", (batch, 4), "ragged",
                ]  # fmt: skip
        for kind in ("tables", "heads"):
            cases.assert_same(result[kind], expected[kind], atol=1e-5)
        assert result["on_root"] == (len(expected["tables"]) if rank == 0 else 0)
    whole = [rows * dim for rows, dim, _ in case.tables if (rows, dim) != cases.HASH_TABLE[:2]]
    most = case.arguments.get("data_parallel_threshold", 0)
    copies = [world_size if size <= most else 1 for size in whole]
    assert sum(result["elements"] for result in ranks) == np.dot(whole, copies)


CONSTRAINED = np.arange(24, dtype=np.float32).reshape(6, 4) / 10


@pytest.mark.parametrize(
    "kind, options, by_rows, sizes",
    [
        ("MaxNorm", {"max_value": 0.5}, False, [12, 12]),
        ("UnitNorm", {"axis": 1}, True, [12, 12]),
        ("UnitNorm", {"axis": 1}, False, [0, 24]),  # it needs whole rows
    ],
)
def test_constraints_see_what_they_need(on_threads, kind, options, by_rows, sizes):
    constraint = getattr(tf.keras.constraints, kind)(**options)

    def check():
        table = tf.keras.layers.Embedding(6, 4, embeddings_constraint=constraint)
        layer = dmp.DistributedEmbedding([table], row_slice_threshold=1 if by_rows else None)
        layer.build(None)
        layer.set_weights([CONSTRAINED])
        pairs = [(tf.zeros_like(v), v) for v in layer.trainable_variables]
        dmp.DistributedOptimizer(tf.keras.optimizers.SGD(1.0)).apply_gradients(pairs)
        (found,) = layer.get_weights(all_ranks=True)
        np.testing.assert_allclose(found, constraint(tf.constant(CONSTRAINED)), rtol=1e-5)
        return sum(int(np.prod(variable.shape)) for variable in layer.trainable_variables)

    assert sorted(on_threads(2, check)) == sizes


# Inputs of the global batch: ragged ones with a combiner only, and ids without a second axis, of
# which in a graph each rank must have one.
GLOBAL_INPUTS = {
    "dense": (cases.TABLES, [*cases.INPUTS[:5], (3, "dense", "int64", 2)]),
    "flat": (
        [(7, 3, None), (5, 2, None), (9, 4, "sum"), (4, 2, None)],
        [
            (0, "flat", "int64", 1),
            (1, "flat", "int32", 1),
            (2, "ragged", "int64", 2),
            (2, "sparse", "int64", 3),
            (3, "flat", "int64", 1),
        ],
    ),
    "hashed": (cases.CASES["hashed"].tables, cases.CASES["hashed"].inputs),
    "idle_rank": ([(3, 1, "sum")], [(0, "dense", "int64", 2)]),
}


@pytest.mark.parametrize(
    "world_size, kind, arguments, graph",
    [
        (1, "dense", {}, True),
        (2, "dense", {}, False),
        (3, "dense", {"column_slice_threshold": 30}, False),
        (2, "flat", {}, True),
        (3, "hashed", {}, False),
        (2, "idle_rank", {}, False),
    ],
)
def test_model_parallel_input(on_threads, world_size, kind, arguments, graph):
    """One step with inputs of the global batch, each on the ranks that hold its table."""
    case = cases.Case({**arguments, "dp_input": False}, *GLOBAL_INPUTS[kind])
    expected = cases.oracle(case, "sgd", world_size, steps=1)

    def check():
        layer, heads, rank = make_layer(case), cases.make_heads(case), comm.current().rank
        layer.set_weights(cases.table_values(case))
        # Batches of equal size, laid end to end: rank r's samples are its part of the global batch.
        of_rank = [cases.batch(case, 0, other, world_size) for other in range(world_size)]
        joined = [[s for ids in of_rank for s in ids[i]] for i in range(len(case.inputs))]
        mine = layer.strategy.input_ids_list[rank]
        inputs = [cases.as_tensor(case, i, joined[i]) for i in mine]

        def step(inputs):
            with tf.GradientTape() as tape:
                outputs = layer(inputs, training=True)
                loss = cases.loss_of(outputs, heads)
            tape = dmp.DistributedGradientTape(tape)
            return outputs, tape.gradient(loss, layer.trainable_variables)

        outputs, gradients = (tf.function(step) if graph else step)(inputs)
        optimizer = sok.OptimizerWrapper(cases.OPTIMIZERS["sgd"]())
        optimizer.apply_gradients(zip(gradients, layer.trainable_variables, strict=True))
        assert [tuple(output.shape) for output in outputs] == {
            "dense": [(4, 1, 4), (4, 8), (4, 4), (4, 3, 4), (4, 6), (4, 2, 4)],
            "flat": [(4, 3), (4, 2), (4, 4), (4, 4), (4, 2)],
            "hashed": [(4, 2, 4), (4, 4), (4, 2), (4, 4)],
            "idle_rank": [(4, 1)],
        }[kind]
        check_outputs([outputs], [expected["outputs"][0][rank]])
        tables = list(map(cases.as_dense, layer.get_weights(all_ranks=True)))
        cases.assert_same(tables, expected["tables"], atol=1e-5)
        # An id outside its table, a batch that ranks cannot share, and an input too many.
        bad = [[99] * case.inputs[0][-1]] * len(joined[0])
        wrong = [cases.as_tensor(case, i, bad if i == 0 else joined[i]) for i in mine]
        words = "(?s)rank (?=.*table 'embedding).*id 99" if world_size > 1 else "id 99"
        with pytest.raises(tf.errors.InvalidArgumentError, match=words):
            layer(wrong)
        if world_size > 1:
            odd = [cases.as_tensor(case, i, [*joined[i], joined[i][0]]) for i in mine]
            with pytest.raises((ValueError, tf.errors.InvalidArgumentError), match="not divisible"):
                layer(odd)
        with pytest.raises(ValueError, match="inputs, got"):
            layer([*inputs, tf.constant([[1]])])

    on_threads(world_size, check)


def test_ids_with_and_without_a_second_axis_cannot_be_told_apart_in_a_graph(on_threads):
    def check():
        layer = dmp.DistributedEmbedding([sok.Embedding(4, 2) for _ in range(4)], dp_input=False)
        ids = tf.constant([1] * 2 * comm.current().world_size)
        mine = layer.strategy.input_ids_list[comm.current().rank]
        inputs = [ids[:, tf.newaxis] if i == 0 else ids for i in mine]
        assert [tuple(o.shape) for o in layer(inputs)] == [(2, 1, 2), (2, 2), (2, 2), (2, 2)]
        with pytest.raises(Exception, match="numbers of axes"):
            tf.function(lambda inputs: layer(inputs))(inputs)

    on_threads(2, check)


def test_weights_from_files_and_weights_that_do_not_fit(on_threads, tmp_path):
    """Paths and arrays mixed, chunks below a row, rank by rank; then lists that do not fit."""
    case = cases.CASES["mixed"]
    values = cases.table_values(case)
    given = list(values)
    for i in (1, 3):
        given[i] = str(tmp_path / f"{i}.npy")
        np.save(given[i], values[i])

    def check():
        layer, last = make_layer(case), comm.current().rank == 2

        def is_unchanged():
            return all(map(np.array_equal, layer.get_weights(all_ranks=True), values))

        layer.set_weights(given, chunk=3, use_lock=True)
        assert is_unchanged()
        for wrong, words in (
            (values[:-1] if last else values, "^rank 2: .*hold 5 tables, .* Received: 4"),
            ([*values, values[0]], "hold 5 tables, one per embedding. Received: 6"),
            (
                [values[0][:-1], *values[1:]] if last else values,
                r"must have the shape \(10, 4\). Received: shape \(9, 4\)",
            ),
        ):
            with pytest.raises(ValueError, match=words):
                layer.set_weights([w * 0 for w in wrong])
        assert is_unchanged()

    on_threads(3, check)


@pytest.mark.parametrize("kind", ["dense", "hashed"])
def test_a_batch_known_to_be_empty_in_a_graph(on_threads, kind):
    """What one rank sends is statically empty."""

    def check():
        table = sok.Embedding(5, 2, "ones", combiner="sum")
        table = sok.HashEmbedding(2, "sum", "ones") if kind == "hashed" else table
        layer = dmp.DistributedEmbedding([table], row_slice_threshold=1)
        layer.build(None)
        is_first = comm.current().rank == 0
        ids = np.zeros([0, 1] if is_first else [2, 1], np.int64) + 3

        @tf.function
        def step():
            with tf.GradientTape() as tape:
                (out,) = layer([tf.constant(ids)])
                loss = tf.reduce_sum(out)
            gradients = tape.gradient(loss, layer.trainable_weights)
            values = [g.values if isinstance(g, tf.IndexedSlices) else g for g in gradients]
            return out, tf.add_n(list(map(tf.reduce_sum, values)))

        out, total = step()
        assert out.numpy().tolist() == ([] if is_first else [[1, 1], [1, 1]])
        return float(total)

    # Two samples of two columns on each rank but the first, divided by the number of ranks.
    np.testing.assert_allclose(sum(on_threads(3, check)), 4 * 2 / 3, rtol=1e-6)


@pytest.mark.parametrize("arguments", [{}, {"row_slice_threshold": 1}])
def test_shards_do_not_start_alike(on_threads, arguments):
    def check():
        init = tf.keras.initializers.RandomUniform(seed=3)
        table = tf.keras.layers.Embedding(12, 6, embeddings_initializer=init)
        (found,) = dmp.DistributedEmbedding([table], **arguments).get_weights(all_ranks=True)
        assert len(np.unique(found)) == found.size

    on_threads(3, check)


def test_local_variables_are_marked_and_not_broadcast(on_threads):
    world_size = 3

    def check():
        case = cases.CASES["mixed"]
        layer, start = make_layer(case), comm.current().rank + 1.0
        layer.set_weights(cases.table_values(case))
        head = tf.keras.layers.Dense(2, kernel_initializer=tf.keras.initializers.Constant(start))
        head.build([None, 3])
        before = layer.get_weights(all_ranks=True)
        opt = dmp.DistributedOptimizer(tf.keras.optimizers.Adam(0.1))
        opt.build([*layer.trainable_variables, *head.trainable_variables])
        slots = opt.variables() if callable(opt.variables) else opt.variables
        own = len(layer.weights) - len(layer.dp_layers)
        assert sum(dmp.is_local(v) for v in layer.weights) == own
        assert sum(dmp.is_local(v) for v in slots) == 2 * own
        every = [*layer.weights, *head.weights, *slots]
        dmp.broadcast_variables(every, root_rank=world_size - 1)
        assert float(head.get_weights()[0][0, 0]) == world_size
        assert all(map(np.array_equal, before, layer.get_weights(all_ranks=True)))
        for root in (-1, world_size):
            words = rf"`root_rank` must be in \[0, 3\). Received: root_rank={root}"
            with pytest.raises(ValueError, match=words):
                dmp.broadcast_variables(head.weights, root_rank=root)

    on_threads(world_size, check)


class Layers(tf.keras.Model):
    """A distributed layer that is used twice, a hash table by itself, and a head."""

    def __init__(self):
        super().__init__()
        items = [sok.Embedding(9, 4, combiner="sum")]
        self.items = dmp.DistributedEmbedding(items, row_slice_threshold=1)
        self.pairs = sok.HashEmbedding(4, "sqrtn", "ones", name="pairs")
        self.head = tf.keras.layers.Dense(1, kernel_initializer="ones")

    def call(self, inputs):
        (a,), (b,) = self.items([inputs[:, 0:2]]), self.items([inputs[:, 2:4]])
        return self.head(tf.concat([a, b, self.pairs(inputs[:, 0:2])], 1))


ITEMS = np.random.default_rng(12).normal(size=[9, 4]).astype(np.float32)


def fit_data(rank):
    rng = np.random.default_rng([11, rank])
    x = rng.integers(0, 6, [16, 4])
    return x.astype(np.int64), rng.normal(size=[16, 1]).astype(np.float32)


def fit_oracle(world_size):
    """The same training on the joined batch, with stock variables."""
    head = tf.keras.layers.Dense(1, kernel_initializer="ones")
    head.build([None, 12])
    items, pairs = tf.Variable(ITEMS), tf.Variable(tf.ones([6, 4]))  # the last one by key
    variables, optimizer = [items, pairs, *head.weights], tf.keras.optimizers.Adam(0.05)
    data = [fit_data(rank) for rank in range(world_size)]
    for start in [*range(0, 16, 4)] * 2:
        x = np.concatenate([x[start : start + 4] for x, _ in data])
        y = np.concatenate([y[start : start + 4] for _, y in data])
        with tf.GradientTape() as tape:
            parts = [tf.reduce_sum(tf.gather(items, x[:, k : k + 2]), 1) for k in (0, 2)]
            parts.append(tf.reduce_sum(tf.gather(pairs, x[:, :2]), 1) / np.sqrt(2.0))
            loss = tf.reduce_mean((head(tf.concat(parts, 1)) - y) ** 2)
        gradients = [tf.convert_to_tensor(g) for g in tape.gradient(loss, variables)]
        optimizer.apply_gradients(zip(gradients, variables, strict=True))
    return items.numpy(), pairs.numpy(), *head.get_weights()


@pytest.mark.parametrize("world_size", [1, 2])
def test_fit_with_other_data_on_each_rank(on_threads, world_size):
    items, pairs, *head = fit_oracle(world_size)

    def check():
        model = Layers()
        model.items.set_weights([ITEMS])
        dataset = tf.data.Dataset.from_tensor_slices(fit_data(comm.current().rank)).batch(4)
        optimizer = sok.OptimizerWrapper(tf.keras.optimizers.Adam(0.05))
        model.compile(dmp.DistributedOptimizer(optimizer), loss="mse", jit_compile=False)
        callback = dmp.BroadcastGlobalVariablesCallback(0)
        model.fit(dataset, epochs=2, verbose=0, callbacks=[callback])
        found = [*model.items.get_weights(all_ranks=True), *model.head.get_weights()]
        cases.assert_same(found, [items, *head], atol=1e-5)
        keys, rows = (part.numpy() for part in sok.export(model.pairs.table))
        np.testing.assert_allclose(rows, pairs[keys], rtol=0, atol=1e-5)
        return keys.tolist()

    assert sorted(k for keys in on_threads(world_size, check) for k in keys) == list(range(6))
