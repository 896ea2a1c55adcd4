"""Hash tables beside dense ones on ranks, against stock layers on one process.

The oracle holds a hash table as a dense table with one row per key.
"""

import functools

import numpy as np
import pytest
import tensorflow as tf

import sok_like
import sok_like.dist_model_parallel as dmp
from sok_like.planner import DistEmbeddingStrategy
from tests.checks import hashed

pytestmark = pytest.mark.keras

each_world = pytest.mark.parametrize("world_size", [1, 3])
each_training = pytest.mark.parametrize(
    "world_size, optimizer",
    [(1, "adagrad"), (3, "adam"), (4, "momentum")],  # of four ranks one owns no key
)


def as_dense(pair):
    """A hash table's weights as one row per key of KEYS."""
    rows = np.ones([len(hashed.KEYS), 4], np.float32)
    for key, row in zip(*pair, strict=True):
        rows[hashed.KEYS.tolist().index(key)] = row
    return rows


def outputs_of(tables, ids):
    """The four outputs from dense tables by one-hot products, whose gradients are dense."""
    cut, ragged, whole, one = ids
    place = {key: i for i, key in enumerate(hashed.KEYS.tolist())}

    def combined(samples, table, mean):
        counts = np.zeros([len(samples), table.shape[0]], np.float32)
        for i, sample in enumerate(samples):
            for x in sample:
                counts[i, x] += 1 / len(sample) if mean else 1
        return counts @ table

    keys = [[[place[k] for k in sample] for sample in samples] for samples in (ragged, one)]
    flat = combined([[x] for sample in cut for x in sample], tables[0], False)
    return [
        tf.reshape(flat, [len(cut), 2, 4]),
        combined(keys[0], tables[2], True),
        combined(whole, tables[1], False),
        combined(keys[1], tables[2], True),
    ]


def dense_layers():
    layers = []
    for value in (*hashed.values()[:2], as_dense(hashed.values()[2])):
        layer = tf.keras.layers.Dense(value.shape[1], use_bias=False)
        layer.build([None, value.shape[0]])
        layer.set_weights([value])
        layers.append(layer)
    return layers


@functools.cache
def oracle(optimizer, world_size):
    """Each step's outputs by rank, and the tables at the end."""
    layers, stock = dense_layers(), hashed.OPTIMIZERS[optimizer]()
    variables = [layer.trainable_variables[0] for layer in layers]
    outputs = []
    for step in range(hashed.STEPS):
        with tf.GradientTape() as tape:
            tables = [tf.convert_to_tensor(v) for v in variables]
            found = [
                outputs_of(tables, hashed.batch(step, rank, world_size))
                for rank in range(world_size)
            ]
            loss = tf.add_n([hashed.loss_of(o) for o in found]) / world_size
        stock.apply_gradients(zip(tape.gradient(loss, variables), variables, strict=True))
        outputs.append(found)
    return outputs, [layer.get_weights()[0] for layer in layers]


@each_training
def test_training_of_all_kinds_of_tables(on_threads, world_size, optimizer):
    outputs, tables = oracle(optimizer, world_size)
    for rank, seen in enumerate(on_threads(world_size, hashed.train, optimizer)):
        for step in range(hashed.STEPS):
            for found, right in zip(seen["outputs"][step], outputs[step][rank], strict=True):
                np.testing.assert_allclose(found, right, rtol=0, atol=1e-5)
        for found, right in zip(seen["weights"][:2], tables[:2], strict=True):
            np.testing.assert_allclose(found, right, rtol=0, atol=1e-5)
        keys, rows = seen["weights"][2]
        assert (np.diff(keys.astype(object)) > 0).all()
        assert set(hashed.GIVEN) <= set(keys) <= set(hashed.KEYS)
        np.testing.assert_allclose(as_dense((keys, rows)), tables[2], rtol=0, atol=1e-5)
        # A table by itself, or one of all tables that were cut; the replicated one is not local.
        assert seen["local"] == ([False, False, True] if world_size == 1 else [False, True, True])
        assert seen["on_root"] == ((3, 2) if rank == 0 else (0, 0))


@each_training
def test_training_goes_on_from_weights_and_state(on_threads, world_size, optimizer):
    slots = {"momentum": 1, "adagrad": 1, "adam": 2}[optimizer]
    for seen in on_threads(world_size, hashed.train, optimizer):
        assert_same(seen["resumed"], seen["weights"], atol=1e-6)
        state = seen["half"][1]
        assert state["iterations"] == 2
        assert [len(of_table) for of_table in state["tables"]] == [slots] * 3
        for of_table, shape in zip(state["tables"][:2], [(10, 4), (3, 2)], strict=True):
            assert {array.shape for array in of_table.values()} == {shape}
        assert_same_state(seen["again"], state)


def assert_same(found, right, atol=0.0):
    for a, b in zip(found, right, strict=True):
        for x, y in zip(
            *(pair if isinstance(pair, tuple) else (pair,) for pair in (a, b)), strict=True
        ):
            np.testing.assert_allclose(x, y, rtol=0, atol=atol)


def assert_same_state(found, right):
    assert found["iterations"] == right["iterations"]
    for mine, of_table in zip(found["tables"], right["tables"], strict=True):
        assert list(mine) == list(of_table)
        assert_same(mine.values(), of_table.values())


def test_the_state_is_that_of_a_stock_optimizer(sok):
    """Which slot variable is which, after a step of Adam: (1 - beta) * g and its square."""
    layer = dmp.DistributedEmbedding([sok.Embedding(3, 2), sok.HashEmbedding(2)])
    optimizer = sok.OptimizerWrapper(tf.keras.optimizers.Adam(0.1))
    with tf.GradientTape() as tape:
        a, b = layer([tf.constant([[1, 1]]), tf.constant([[9]])])
        loss = tf.reduce_sum(a * [1.0, 3.0]) + 5 * tf.reduce_sum(b)
    variables = layer.trainable_variables
    optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables, strict=True))
    state = layer.get_optimizer_state(optimizer)
    momentum, velocity = state["tables"][0]["momentums"], state["tables"][0]["velocities"]
    np.testing.assert_allclose(momentum, [[0, 0], [0.2, 0.6], [0, 0]], rtol=1e-5)
    np.testing.assert_allclose(velocity, [[0, 0], [0.004, 0.036], [0, 0]], rtol=1e-5)
    of_keys = state["tables"][1]
    assert all(keys.tolist() == [9] for keys, _ in of_keys.values())
    rows = sorted(rows[0, 0] for _, rows in of_keys.values())
    np.testing.assert_allclose(rows, [0.025, 0.5], rtol=1e-5)


@each_world
def test_evaluation_inserts_nothing(on_threads, world_size):
    cut, whole, (keys, rows) = hashed.values()
    tables = [tf.constant(table) for table in (cut, whole, as_dense((keys[:1], rows[:1])))]
    batches = [hashed.batch(0, rank, world_size) for rank in range(world_size)]
    seen = {key for ids in batches for i in (1, 3) for sample in ids[i] for key in sample}
    held = len(seen | {int(keys[0])})
    for rank, (sizes, found, trained) in enumerate(on_threads(world_size, hashed.evaluation)):
        for a, b, c in zip(found, trained, outputs_of(tables, batches[rank]), strict=True):
            np.testing.assert_allclose(a, c, rtol=0, atol=1e-6)
            np.testing.assert_array_equal(a, b)
        assert sizes == [1, 1, held]
        assert held > 1


@each_world
def test_model_parallel_input(on_threads, world_size):
    layers = dense_layers()
    variables = [layer.trainable_variables[0] for layer in layers]
    with tf.GradientTape() as tape:
        tables = [tf.convert_to_tensor(v) for v in variables]
        outputs = [outputs_of(tables, hashed.batch(0, r, 1)) for r in range(world_size)]
        loss = tf.add_n([hashed.loss_of(o) for o in outputs]) / world_size
    gradients = tape.gradient(loss, variables)
    stock = tf.keras.optimizers.SGD(0.02)
    stock.apply_gradients(zip(gradients, variables, strict=True))
    tables = [layer.get_weights()[0] for layer in layers]
    for rank, (found, weights) in enumerate(on_threads(world_size, hashed.model_parallel)):
        for a, b in zip(found, outputs[rank], strict=True):
            np.testing.assert_allclose(a, b, rtol=0, atol=1e-5)
        assert_same([*weights[:2], as_dense(weights[2])], tables, atol=1e-5)


@each_world
def test_what_goes_wrong_on_one_rank(on_threads, world_size):
    for seen in on_threads(world_size, hashed.failures):
        for graph in (False, True):
            assert "table 'tiny'" in seen["full", graph]
            assert "max_capacity=4" in seen["full", graph]
            for name, number in (("replicated", "9"), ("alone", "-1")):
                assert "must be in [0, input_dim). Received: id" in seen[name, graph]
                assert number in seen[name, graph]
                if world_size > 1:
                    assert f"rank {world_size - 1}: " in seen[name, graph]
        assert "each key once. Received: duplicate keys" in seen["twice"]
        assert "Received: 2 keys and rows of shape (3, 2)" in seen["rows"]
        assert "must hold at most capacity=4 keys per rank" in seen["too_many"]
        assert "must be a pair (keys [n], rows [n, 2])" in seen["dense"]
        assert "has keys of int32. Received: key" in seen["narrow"]
        assert str(2**40) in seen["narrow"]
        assert seen["kept"]


@each_world
def test_ids_that_one_ranks_graph_knows_beforehand(on_threads, world_size):
    gradients = {}
    for rank, (size, of_rank) in enumerate(on_threads(world_size, hashed.constants)):
        assert size == (0 if rank == world_size - 1 else 2)
        gradients |= of_rank
    scale = (world_size - 1) / world_size
    right = {4: [scale] * 2, 5: [scale] * 2} if world_size > 1 else {}
    assert gradients.keys() == right.keys()
    for key, gradient in right.items():
        np.testing.assert_allclose(gradients[key], gradient, rtol=1e-6)


@each_world
def test_a_table_without_inputs(on_threads, world_size):
    found = on_threads(world_size, hashed.unused_table)
    assert found[0][0][:3] == [0, 0, 1]
    assert not any(any(values) for rank in found[1:] for values in rank)


@each_world
def test_by_itself_in_fit(on_threads, world_size):
    rows = tf.Variable(np.ones([len(hashed.KEYS), 3], np.float32))
    head = tf.keras.layers.Dense(1, kernel_initializer="ones")
    head.build([None, 3])
    table = tf.keras.layers.Dense(3, use_bias=False, kernel_initializer="ones")
    table.build([None, len(hashed.KEYS)])
    variables = [*table.trainable_variables, *head.trainable_variables]
    stock = tf.keras.optimizers.Adam(0.05)
    data = [hashed.fit_data(rank) for rank in range(world_size)]
    for _ in range(2):
        for start in (0, 4):
            x = np.concatenate([x[start : start + 4] for x, _ in data])
            y = np.concatenate([y[start : start + 4] for _, y in data])
            counts = (x[:, :, None] == hashed.KEYS).sum(1).astype(np.float32) / np.sqrt(2)
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean((head(table(counts)) - y) ** 2)
            stock.apply_gradients(zip(tape.gradient(loss, variables), variables, strict=True))
    rows = table.get_weights()[0]
    held = []
    for keys, found, head_found in on_threads(world_size, hashed.alone):
        held += keys.tolist()
        for key, row in zip(keys.tolist(), found, strict=True):
            right = rows[hashed.KEYS.tolist().index(key)]
            np.testing.assert_allclose(row, right, rtol=0, atol=1e-5)
        assert_same(head_found, head.get_weights(), atol=1e-5)
    assert sorted(held) == sorted({k for x, _ in data for k in x.ravel().tolist()})


def write(folder, weights, state):
    cut, whole, (keys, rows) = weights
    slots = state["tables"]
    np.save(folder / "cut.npy", cut)
    np.save(folder / "keys.npy", keys)
    np.save(folder / "cut_momentums.npy", slots[0]["momentums"])
    np.save(folder / "cut_velocities.npy", slots[0]["velocities"])
    hash_rows = {f"hash_{name}": array for name, (_, array) in slots[2].items()}
    np.savez(folder / "arrays.npz", whole=whole, rows=rows, **slots[1], **hash_rows)


def set_and_get(folder):
    """Weights and state from files and arrays mixed, and what comes back."""
    trainer = hashed.Trainer("whole", "adam")
    trainer.layer.build()
    trainer.optimizer.build(trainer.layer.trainable_variables)
    kept = np.load(folder / "arrays.npz")
    layer, path = trainer.layer, lambda name: str(folder / f"{name}.npy")
    layer.set_weights([path("cut"), kept["whole"], (path("keys"), kept["rows"])])
    of_hash_table = {
        name[5:]: (path("keys"), kept[name]) for name in kept.files if name.startswith("hash_")
    }
    momentums, velocities = kept["momentums"], kept["velocities"]
    tables = [
        {"momentums": path("cut_momentums"), "velocities": path("cut_velocities")},
        {"momentums": momentums, "velocities": velocities},
        of_hash_table,
    ]
    layer.set_optimizer_state(trainer.optimizer, {"iterations": 2, "tables": tables})
    state = layer.get_optimizer_state(trainer.optimizer, all_ranks=True)
    return layer.get_weights(all_ranks=True), state


def test_from_three_ranks_to_two_through_files(on_threads, tmp_path):
    weights, state = on_threads(3, hashed.train, "adam")[0]["half"]
    write(tmp_path, weights, state)
    for found, found_state in on_threads(2, set_and_get, tmp_path):
        assert_same(found, weights)
        assert_same_state(found_state, state)


INPUTS = {
    "dense": (tf.constant([[3, 3], [-1, 3]], tf.int32), None),
    "flat": (tf.constant([3, -1, 3], tf.int64), None),
    "ragged": (tf.ragged.constant([[3, -1], [], [3]], dtype=tf.int64), "mean"),
    "sparse": (tf.sparse.from_dense(tf.constant([[3, -1], [0, 0], [0, 3]], tf.int64)), "sum"),
    "rows": (tf.ragged.constant([[3, -1], [], [3]], dtype=tf.int64), None),
    "unsigned": (tf.constant([[2**64 - 1, 3]], tf.uint64), "sqrtn"),
}


@pytest.mark.parametrize("kind", INPUTS)
def test_inputs_of_the_layer_by_itself(sok, kind):
    ids, combiner = INPUTS[kind]
    layer = sok.HashEmbedding(2, combiner, name="kinds")
    layer.build()
    rows = {3: [1.0, 2.0], -1: [10.0, 20.0]}
    sok.assign(layer.table, list(rows), list(rows.values()))
    output = layer(ids)
    if isinstance(ids, tf.SparseTensor):
        samples = [[3, -1], [], [3]]
    elif isinstance(ids, tf.RaggedTensor):
        samples = ids.to_list()
    else:
        samples = [
            [-1 if k == 2**64 - 1 else k for k in s]
            for s in tf.reshape(ids, [-1, ids.shape[-1]]).numpy().tolist()
        ]
    found = [[rows[k] for k in sample] for sample in samples]
    if combiner is None:
        kept = output.to_list() if isinstance(output, tf.RaggedTensor) else output.numpy().tolist()
        assert kept == (found[0] if kind == "flat" else found)
        return
    divisor = {"sum": lambda n: 1, "mean": lambda n: n, "sqrtn": lambda n: n**0.5}[combiner]
    right = [np.sum(f, 0) / divisor(len(f)) if f else [0, 0] for f in found]
    np.testing.assert_allclose(output, right, rtol=1e-6)


def test_configuration(sok):
    layer = dmp.DistributedEmbedding(
        [sok.HashEmbedding(2, "sqrtn", "ones", capacity=9, key_dtype="int32", name="configured")]
    )
    again = dmp.DistributedEmbedding.from_config(layer.get_config())
    assert again.get_config() == layer.get_config()
    keys, rows = again.get_weights()[0]
    assert keys.dtype == np.int32 and keys.shape == (0,) and rows.shape == (0, 2)
    assert again.hash_layers[0].table.get_config()["capacity"] == 9
    with pytest.raises(ValueError, match="`combiner` must be one of .*Received: combiner='max'"):
        sok.HashEmbedding(2, "max")
    with pytest.raises(ValueError, match="`capacity` must be a positive integer. Received: .*=0"):
        sok.HashEmbedding(2, capacity=0)


def test_weights_of_a_layer_that_was_not_called(sok):
    tables = [sok.Embedding(3, 2), sok.HashEmbedding(2, name="uncalled")]
    layer = dmp.DistributedEmbedding(tables)
    with pytest.raises(ValueError, match="must hold 2 tables, one per embedding. Received: 1"):
        layer.set_weights([np.zeros([3, 2])])
    layer = dmp.DistributedEmbedding(tables)
    layer.set_weights([np.ones([3, 2]), ([4], [[5.0, 6.0]])])
    assert_same(layer.get_weights(), [np.ones([3, 2]), (np.array([4]), np.array([[5.0, 6.0]]))])


def test_the_table_exists_once_the_layer_is_built(sok):
    layer = sok.HashEmbedding(2, name="late")
    for attribute in ("table", "embedding_variable"):
        with pytest.raises(RuntimeError, match="call the layer, or its `build.*Received: .*'late'"):
            getattr(layer, attribute)
    layer.build()
    assert layer.table.table_name == "late"


def test_state_that_does_not_fit(sok):
    layer = dmp.DistributedEmbedding([sok.Embedding(3, 2), sok.HashEmbedding(2, name="misfit")])
    optimizer = sok.OptimizerWrapper(tf.keras.optimizers.Adagrad(0.1))
    with pytest.raises(ValueError, match="`optimizer` must know the layer's variables"):
        layer.get_optimizer_state(optimizer)
    optimizer.build(layer.trainable_variables)
    layer.set_weights([np.ones([3, 2]), ([4], [[5.0, 6.0]])])
    right = layer.get_optimizer_state(optimizer)
    array = np.full([3, 2], 0.5)
    pair = (np.array([4]), np.array([[1.0, 1.0]]))
    good = {"accumulators": array}
    cases = [
        (0, [good], "of which there are 2"),
        (-1, [good, {"a": pair}], "iterations=-1"),
        (1, [{"momentums": array}, {}], r"slot variables, \['accumulators'\]"),
        (1, [{"accumulators": array[:2]}, {}], r"shape \(3, 2\). Received: shape \(2, 2\)"),
        (1, [good, {"a": (pair[0] + 1, pair[1])}], "must have the keys of table 'misfit'"),
        (1, [good, {"a": pair[0]}], r"must be a pair \(keys"),
    ]
    for iterations, tables, sentence in cases:
        wrong = {"iterations": iterations, "tables": tables}
        with pytest.raises(ValueError, match=sentence):
            layer.set_optimizer_state(optimizer, wrong)
        assert_same_state(layer.get_optimizer_state(optimizer), right)


def test_stock_optimizer_is_refused(sok):
    layer = dmp.DistributedEmbedding([sok.HashEmbedding(2, name="bare")])
    layer.build()
    optimizer = dmp.DistributedOptimizer(tf.keras.optimizers.Adam(0.1))
    with pytest.raises(NotImplementedError, match="OptimizerWrapper"):
        optimizer.build(layer.trainable_variables)


def test_report_of_the_planner():
    config = {"hash_table": True, "output_dim": 4, "name": "keys", "combiner": "sum"}
    dense = {"input_dim": 6, "output_dim": 2, "name": "rows"}
    strategy = DistEmbeddingStrategy([dense, config, {**config, "name": "full", "capacity": 50}], 2)
    assert strategy.table_groups == [[], [0], [], [1, 2]]
    assert [i for group in strategy.input_groups for i in group] == [0, 1, 2]
    lines = [line.split() for line in strategy.report(local_batch=10, hotness=2).splitlines()]
    # 20 keys of the other rank, half of them of this shard: 8 bytes each, and rows of 16 twice.
    assert ["1", "keys", "hash", "table", "1", "mod", "2", "0:4", "grows", "10", "400"] in lines
    assert ["0", "full", "hash", "table", "0", "mod", "2", "0:4", "800", "10", "400"] in lines
    strategy.deal_hash_inputs()
    # The dense table is cut in two, so both ranks have its input, and then one of a hash table.
    assert strategy.input_ids_list == [[0, 1], [0, 2]]
    assert "1.00 of the mean" in DistEmbeddingStrategy([config], 2).report()


def test_the_name_is_public():
    assert sok_like.HashEmbedding.__name__ == "HashEmbedding"
