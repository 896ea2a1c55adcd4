"""Hash tables beside dense ones on ranks, against stock layers on one process."""

import numpy as np
import pytest
import tensorflow as tf

import sok_like as sok
import sok_like.dist_model_parallel as dmp
from sok_like.planner import DistEmbeddingStrategy
from sok_like.runtime.ranks import comm
from tests.dist_model_parallel import cases
from tests.dist_model_parallel.cases import assert_same
from tests.training import train_step

pytestmark = pytest.mark.keras

CASE = cases.CASES["hashed"]


def train(optimizer):
    """Some steps, a copy by weights and state, and the rest."""
    by = "wrapper" if optimizer == "adam" else "tape"
    first, second = (cases.Trainer(CASE, optimizer, False, by) for _ in range(2))
    for trainer in (first, second):
        trainer.optimizer.build(trainer.variables)
    first.train(range(2))
    weights = first.layer.get_weights(all_ranks=True)
    state = first.layer.get_optimizer_state(first.optimizer, all_ranks=True)
    second.layer.set_weights(weights)
    second.layer.set_optimizer_state(second.optimizer, state, chunk=3, use_lock=True)
    again = second.layer.get_optimizer_state(second.optimizer, all_ranks=True)
    for ours, theirs in zip(second.heads, first.heads, strict=True):
        ours.set_weights(theirs.get_weights())
    second.train(range(2, cases.STEPS))
    return {
        "weights": second.layer.get_weights(all_ranks=True),
        "half": (weights, state),
        "again": again,
        "on_root": len(first.layer.get_optimizer_state(first.optimizer)),
        "local": [dmp.is_local(v) for v in first.layer.trainable_variables],
    }


@pytest.mark.parametrize("world_size, optimizer", [(1, "adagrad"), (3, "adam"), (4, "momentum")])
def test_training_goes_on_from_weights_and_state(on_threads, world_size, optimizer):
    slots = {"momentum": 1, "adagrad": 1, "adam": 2}[optimizer]
    expected = cases.oracle(CASE, optimizer, world_size)["tables"]
    for rank, seen in enumerate(on_threads(world_size, train, optimizer)):
        assert_same(list(map(cases.as_dense, seen["weights"])), expected, atol=1e-5)
        keys = seen["weights"][2][0]
        assert (np.diff(keys.astype(object)) > 0).all()
        assert set(cases.GIVEN) <= set(keys) <= set(cases.KEYS)
        # A table by itself, or one of all tables that were cut; the replicated one is not local.
        assert seen["local"] == ([False, False, True] if world_size == 1 else [False, True, True])
        state = seen["half"][1]
        assert state["iterations"] == 2 and seen["on_root"] == (0 if rank else 2)
        assert [len(of_table) for of_table in state["tables"]] == [slots] * 3
        for of_table, shape in zip(state["tables"][:2], [(10, 4), (3, 2)], strict=True):
            assert {array.shape for array in of_table.values()} == {shape}
        assert_same(seen["again"], state)


def test_from_three_ranks_to_two_through_files(on_threads, tmp_path):
    """Weights and state from files and arrays mixed, and what comes back."""
    given = on_threads(3, train, "adam")[0]["half"]
    arrays = tf.nest.flatten(given)
    for number in range(0, len(arrays), 2):
        if np.ndim(arrays[number]):
            np.save(tmp_path / f"{number}.npy", arrays[number])
            arrays[number] = str(tmp_path / f"{number}.npy")
    mixed = tf.nest.pack_sequence_as(given, arrays)

    def check():
        trainer = cases.Trainer(CASE, "adam", True, "wrapper")
        trainer.optimizer.build(trainer.variables)
        layer, (weights, state) = trainer.layer, mixed
        layer.set_weights(weights)
        layer.set_optimizer_state(trainer.optimizer, state)
        found = layer.get_optimizer_state(trainer.optimizer, all_ranks=True)
        assert_same((layer.get_weights(all_ranks=True), found), given)

    on_threads(2, check)


def test_the_state_is_that_of_a_stock_optimizer(sok):
    """Which slot variable is which, after a step of Adam: (1 - beta) * g and its square."""
    layer = dmp.DistributedEmbedding([sok.Embedding(3, 2), sok.HashEmbedding(2)])
    optimizer = sok.OptimizerWrapper(tf.keras.optimizers.Adam(0.1))

    def loss_of():
        a, b = layer([tf.constant([[1, 1]]), tf.constant([[9]])])
        return tf.reduce_sum(a * [1.0, 3.0]) + 5 * tf.reduce_sum(b)

    layer.build()
    train_step(optimizer, layer.trainable_variables, loss_of)
    state = layer.get_optimizer_state(optimizer)
    momentum, velocity = state["tables"][0]["momentums"], state["tables"][0]["velocities"]
    np.testing.assert_allclose(momentum, [[0, 0], [0.2, 0.6], [0, 0]], rtol=1e-5)
    np.testing.assert_allclose(velocity, [[0, 0], [0.004, 0.036], [0, 0]], rtol=1e-5)
    of_keys = state["tables"][1]
    assert all(keys.tolist() == [9] for keys, _ in of_keys.values())
    rows = sorted(rows[0, 0] for _, rows in of_keys.values())
    np.testing.assert_allclose(rows, [0.025, 0.5], rtol=1e-5)


def test_a_key_without_an_update_has_nan_in_the_state(on_threads):
    """It stands for the optimizer's initial value."""

    def check():
        layer = dmp.DistributedEmbedding([sok.HashEmbedding(2)])
        optimizer = sok.OptimizerWrapper(tf.keras.optimizers.Adagrad(0.1))
        layer.build()
        optimizer.build(layer.trainable_variables)
        key, row = np.array([0]), np.full([1, 2], 3.0, np.float32)
        layer.set_weights([(key, row)])
        state = {"iterations": 1, "tables": [{"accumulator": (key, row)}]}
        layer.set_optimizer_state(optimizer, state)
        layer([tf.constant([[1]])], training=True)  # a key of rank 1, which had none
        state = layer.get_optimizer_state(optimizer, all_ranks=True)
        keys, rows = state["tables"][0]["accumulator"]
        np.testing.assert_array_equal(keys, [0, 1])
        np.testing.assert_array_equal(rows, [[3, 3], [np.nan, np.nan]])

    on_threads(2, check)


def test_evaluation_inserts_nothing(on_threads):
    """Nor does one in a function; a training inserts all keys of all ranks."""
    case, world_size = CASE, 3
    cut, whole, (keys, rows) = cases.table_values(case)
    weights = [cut, whole, (keys[:1], rows[:1])]
    batches = [cases.batch(case, 0, rank, world_size) for rank in range(world_size)]
    seen = {i for ids in batches for number in (1, 3) for sample in ids[number] for i in sample}
    held = len({*cases.KEYS[list(seen)], keys[0]})

    def check():
        layer = cases.make_layer(case)
        layer.set_weights(weights)
        inputs, rank = cases.tensors(case, 0), comm.current().rank
        for training, count in ((False, 1), (True, held)):
            found = layer(inputs, training=training)
            tf.function(lambda *x, training=training: layer(list(x), training=training))(*inputs)
            assert len(layer.get_weights(all_ranks=True)[2][0]) == count
            for (table, *_), samples, ours in zip(case.inputs, batches[rank], found, strict=True):
                size, _, combiner = case.tables[table]
                right = cases.counts(samples, size, combiner) @ cases.as_dense(weights[table])
                np.testing.assert_allclose(cases.flat(ours), right, rtol=0, atol=1e-6)

    assert held > 1
    on_threads(world_size, check)


@pytest.mark.parametrize("world_size", [1, 3])
def test_what_goes_wrong_on_one_rank(on_threads, world_size):
    """Every rank raises, and all continue."""

    def check():
        last = comm.current().rank == world_size - 1
        who = f"(?s)rank {world_size - 1}: .*" if world_size > 1 else "(?s)"
        items = tf.keras.layers.Embedding(9, 2, name="items")
        tables = [sok.HashEmbedding(2, capacity=4, name="tiny"), items]
        full = dmp.DistributedEmbedding(tables, data_parallel_threshold=18)
        copied, cut, placed = (
            dmp.DistributedEmbedding([items], **arguments)
            for arguments in ({"data_parallel_threshold": 18}, {"row_slice_threshold": 1}, {})
        )
        fine = [tf.constant([[1, 2]]), tf.constant([[8]])]
        many = tf.range(100, 100 + 10 * world_size, dtype=tf.int64)[tf.newaxis]
        outside = (
            who + r"(?=.*'items).*must (be|lie) in .0, (input_dim|9).*Received: (id|key).*[ \[]"
        )
        for layer, inputs, error, words in (
            (full, [many, fine[1]], tf.errors.ResourceExhaustedError, "max_capacity=4.*'tiny'"),
            (full, [fine[0], [[9 if last else 3]]], tf.errors.InvalidArgumentError, outside + "9"),
            (copied, [[[-1 if last else 3]]], tf.errors.InvalidArgumentError, outside + "-1"),
            (cut, [[[9 if last else 3]]], tf.errors.InvalidArgumentError, outside + "9"),
            (placed, [[[-1 if last else 3]]], tf.errors.InvalidArgumentError, outside + "-1"),
        ):
            inputs = list(map(tf.constant, inputs))
            in_function = tf.function(lambda *x, layer=layer: layer(list(x), training=True))
            for call in (lambda *x, layer=layer: layer(list(x), training=True), in_function):
                with pytest.raises(error, match=words):
                    call(*inputs)
            layer(fine if layer is full else fine[1:])
        before = full.get_weights(all_ranks=True)
        rows = lambda n: np.zeros([n, 2], np.float32)  # noqa: E731
        for pair, words in (
            (([1, 1], rows(2)), "each key once. Received: duplicate keys"),
            (([1, 2], rows(3)), r"Received: 2 keys and rows of shape \(3, 2\)"),
            ((np.arange(100), rows(100)), "must hold at most capacity=4 keys per rank"),
            (rows(2), r"must be a pair \(keys \[n\], rows \[n, 2\]\)"),
        ):
            with pytest.raises(ValueError, match=words):
                full.set_weights([pair if last else before[0], before[1] * 0])
        assert_same(full.get_weights(all_ranks=True), before)
        narrow = dmp.DistributedEmbedding([sok.HashEmbedding(2, key_dtype="int32", name="narrow")])
        narrow([tf.constant([2**40, 1])])  # rank 0 has the first key
        error = (ValueError, tf.errors.InvalidArgumentError)
        with pytest.raises(error, match=f"(?s)has keys of int32. Received: key.*{2**40}"):
            narrow.get_weights()

    on_threads(world_size, check)


RAGGED = tf.ragged.constant([[3, -1], [], [3]], dtype=tf.int64)
FIRST, SECOND = [1.0, 2.0], [10.0, 20.0]  # rows of keys 3 and -1
INPUTS = {  # what is given, the combiner, and what comes back
    "dense": (tf.constant([[3, 3], [-1, 3]], tf.int32), None, [[FIRST, FIRST], [SECOND, FIRST]]),
    "flat": (tf.constant([3, -1, 3], tf.int64), None, [FIRST, SECOND, FIRST]),
    "ragged": (RAGGED, "mean", [[5.5, 11.0], [0.0, 0.0], FIRST]),
    "sparse": (RAGGED.to_sparse(), "sum", [[11.0, 22.0], [0.0, 0.0], FIRST]),
    "rows": (RAGGED, None, [[FIRST, SECOND], [], [FIRST]]),
    "unsigned": (tf.constant([[2**64 - 1, 3]], tf.uint64), "sqrtn", [[11 / 2**0.5, 22 / 2**0.5]]),
}


@pytest.mark.parametrize("kind", INPUTS)
def test_inputs_of_the_layer_by_itself(sok, kind):
    ids, combiner, right = INPUTS[kind]
    layer = sok.HashEmbedding(2, combiner, name="kinds")
    layer.build()
    sok.assign(layer.table, [3, -1], [FIRST, SECOND])
    output = layer(ids)
    if kind == "rows":
        assert output.to_list() == right
    else:
        np.testing.assert_allclose(output, right, rtol=1e-6)


def test_configuration(sok):
    options = {"capacity": 9, "key_dtype": "int32", "name": "configured"}
    layer = dmp.DistributedEmbedding([sok.HashEmbedding(2, "sqrtn", "ones", **options)])
    again = dmp.DistributedEmbedding.from_config(layer.get_config())
    assert again.get_config() == layer.get_config()
    keys, rows = again.get_weights()[0]
    assert keys.dtype == np.int32 and keys.shape == (0,) and rows.shape == (0, 2)
    assert again.hash_layers[0].table.get_config()["capacity"] == 9
    with pytest.raises(ValueError, match="`combiner` must be one of .*Received: combiner='max'"):
        sok.HashEmbedding(2, "max")
    with pytest.raises(ValueError, match="`capacity` must be a positive integer. Received: .*=0"):
        sok.HashEmbedding(2, capacity=0)
    layer = sok.HashEmbedding(2, name="late")
    for attribute in ("table", "embedding_variable"):
        with pytest.raises(RuntimeError, match="call the layer, or its `build.*Received: .*'late'"):
            getattr(layer, attribute)
    layer.build()
    assert layer.table.table_name == "late"
    stock = dmp.DistributedOptimizer(tf.keras.optimizers.Adam(0.1))
    with pytest.raises(NotImplementedError, match="OptimizerWrapper"):
        stock.build(layer.trainable_variables)


def test_weights_and_state_of_a_layer_that_was_not_called(sok):
    layer = dmp.DistributedEmbedding([sok.Embedding(3, 2), sok.HashEmbedding(2, name="misfit")])
    with pytest.raises(ValueError, match="must hold 2 tables, one per embedding. Received: 1"):
        layer.set_weights([np.zeros([3, 2])])
    layer.set_weights([np.ones([3, 2]), ([4], [[5.0, 6.0]])])
    assert_same(layer.get_weights(), [np.ones([3, 2]), (np.array([4]), np.array([[5.0, 6.0]]))])
    optimizer = sok.OptimizerWrapper(tf.keras.optimizers.Adagrad(0.1))
    with pytest.raises(ValueError, match="`optimizer` must know the layer's variables"):
        layer.get_optimizer_state(optimizer)
    optimizer.build(layer.trainable_variables)
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
        assert_same(layer.get_optimizer_state(optimizer), right)


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
