"""Variables, what is read from them and written to files, and bounded tables, on one rank."""

import copy
import datetime

import numpy as np
import pytest
import tensorflow as tf

from sok_like import sok2
from tests.training import train_step

TABLE = np.arange(12, dtype=np.float32).reshape(4, 3)


@pytest.fixture(autouse=True)
def _one_rank(sok):
    sok2.init(use_legacy_optimizer=False)


def test_variable_is_a_tf_variable_of_the_rows_given():
    variable = sok2.Variable(TABLE, name="plain")
    assert isinstance(variable, tf.Variable) and variable.trainable
    np.testing.assert_array_equal(variable.numpy(), TABLE)
    assert (variable.global_shape, variable.target_gpu, variable.num_gpus) == ((4, 3), -1, 1)
    np.testing.assert_array_equal(tf.nn.embedding_lookup(variable, [2]), TABLE[2:3])
    assert sok2.Variable([[3, 4, 5]]).dtype == tf.int64
    assert sok2.Variable([1.0, 2.0]).shape == [1, 2]
    assert sok2.Variable(lambda: tf.constant(TABLE), dtype=tf.float16).dtype == tf.float16
    assert not sok2.Variable(TABLE, trainable=False).trainable
    assert sok2.Variable(TABLE, mode="localized:0").target_gpu == 0


def test_an_initializer_of_any_kind_fills_a_shape():
    def filled(shape, initializer, **options):
        return sok2.Variable(shape=shape, initializer=initializer, **options).numpy()

    def counted(shape, dtype):
        return tf.reshape(tf.range(12, dtype=dtype), shape)

    np.testing.assert_array_equal(filled([4, 3], "zeros"), np.zeros([4, 3]))
    np.testing.assert_array_equal(filled([4, 3], counted, dtype=tf.float32), TABLE)
    initializers = tf.keras.initializers
    np.testing.assert_array_equal(filled([3, 3], initializers.Identity()), np.eye(3))
    normal = filled([400, 30], initializers.RandomNormal(1.0, 0.1, seed=3))
    assert abs(normal.mean() - 1) < 0.01 and abs(normal.std() - 0.1) < 0.01


@pytest.mark.parametrize(
    "arguments, message",
    [
        ({"mode": "replicated", "initial_value": TABLE}, "`mode` must be"),
        ({"mode": "localized:1", "initial_value": TABLE}, "one of the 1 ranks"),
        ({"mode": "localized", "initial_value": TABLE}, "`mode` must be"),
        ({"initial_value": TABLE[np.newaxis]}, r"\[rows, dim\]"),
        ({}, "`shape` and `initializer` must both"),
        ({"shape": [4, 3]}, "`shape` and `initializer` must both"),
        ({"shape": [4], "initializer": "zeros"}, "`shape` must be"),
        ({"initial_value": TABLE, "initializer": "zeros"}, "must be None"),
        ({"initial_value": TABLE, "import_scope": "x"}, "`import_scope` must be None"),
    ],
)
def test_variable_refuses(arguments, message):
    with pytest.raises(ValueError, match=message):
        sok2.Variable(**arguments)


def test_dynamic_variable_under_its_names():
    table = sok2.DynamicVariable(3, initializer="13", var_type="hbm", key_type=tf.int32)
    assert table.size.numpy().tolist() == [0, 3]
    rows = tf.nn.embedding_lookup(table, [0, 1, 2**20])
    np.testing.assert_array_equal(rows, np.full([3, 3], 13.0))
    assert table.size.numpy().tolist() == [3, 3]
    assert len(table) == 3 and 2**20 in table and 2 not in table
    assert (table.dimension, table.key_type, table.backend_type) == (3, tf.int32, "hbm")
    assert (table.target_gpu, table.num_gpus, table.mode) == (-1, 1, None)
    assert table.initializer_str == "13" and table.handle_dtype == tf.float32
    keys, rows = sok2.export(table)
    assert keys.dtype == tf.int32 and keys.numpy().tolist() == [0, 1, 2**20]
    assert sok2.assign(table, [5], [[1.0, 2.0, 3.0]]) is table
    np.testing.assert_array_equal(table.sparse_read([5]), [[1, 2, 3]])
    hybrid = sok2.DynamicVariable(3, init_capacity=8, max_capacity=16, mode="localized:0")
    assert (hybrid.backend_type, hybrid.target_gpu) == ("hybrid", 0)
    assert hybrid.config_dict == {"init_capacity": 8, "max_capacity": 16}
    assert sok2.DynamicVariable(3, max_capacity=1).config_dict == {"max_capacity": 1}


def test_scatter():
    with pytest.warns(UserWarning, match="max_hbm_for_vectors"):  # of HierarchicalKV's layout
        table = sok2.DynamicVariable(2, "1", "hbm", max_hbm_for_vectors=16)
    table.scatter_add(tf.IndexedSlices(tf.ones([3, 2]), [7, 8, 7]))
    table.scatter_update(tf.IndexedSlices(tf.fill([1, 2], 9.0), [8]))
    keys, rows = sok2.export(table)
    assert keys.numpy().tolist() == [7, 8] and rows.numpy()[:, 0].tolist() == [3, 9]
    with pytest.raises(TypeError, match="`sparse_delta` must be tf.IndexedSlices"):
        table.scatter_sub(tf.ones([1, 2]))


@pytest.mark.parametrize(
    "initializer, var_type, mean, least, largest",
    [
        ("random", "hbm", 0.5, 0, 1),
        (None, "hbm", 0.5, 0, 1),
        ("uniform", "hybrid", 0.5, 0, 1),
        ("random", "hybrid", 0, -9, 9),
        ("normal", "hbm", 0, -9, 9),
        ("ones", "hbm", 1, 1, 1),
        ("zeros", "hbm", 0, 0, 0),
        ("-2.5", "hybrid", -2.5, -2.5, -2.5),
    ],
)
def test_initializers(initializer, var_type, mean, least, largest):
    table = sok2.DynamicVariable(16, initializer, var_type, max_capacity=2000)
    rows = table.sparse_read(tf.range(1000, dtype=tf.int64)).numpy()
    assert abs(rows.mean() - mean) < 0.03 and least <= rows.min() and rows.max() <= largest
    if largest == 9:
        assert abs(rows.std() - 1) < 0.03


@pytest.mark.parametrize(
    "arguments, error, message",
    [
        ({"var_type": "ssd"}, ValueError, "`var_type` must be"),
        ({"var_type": "hybrid", "key_type": tf.int32}, NotImplementedError, "int64"),
        ({"dtype": tf.float16}, NotImplementedError, "float32"),
        ({"constraint": tf.nn.relu}, NotImplementedError, "`constraint`"),
        ({"filter_ratio": 0.5}, NotImplementedError, "CounterFilter"),
        ({"evict_strategy": "kFifo"}, ValueError, "`evict_strategy`"),
        ({"evict_strategy": "kLru", "var_type": "hbm"}, ValueError, "evicts nothing"),
        ({"max_hbm": 3}, TypeError, "max_hbm"),
        ({"init_capacity": 9, "max_capacity": 8}, ValueError, "initial_capacity"),
        ({"initializer": "somehow"}, ValueError, "somehow"),
    ],
)
def test_dynamic_variable_refuses(arguments, error, message):
    with pytest.raises(error, match=message):
        sok2.DynamicVariable(3, **arguments)


def test_a_table_of_hbm_that_is_full_raises_and_one_of_hybrid_evicts():
    full = sok2.DynamicVariable(2, "1", "hbm", max_capacity=2)
    full.sparse_read([1, 2])
    with pytest.raises(tf.errors.ResourceExhaustedError):
        full.sparse_read([3])
    evicting = sok2.DynamicVariable(2, "1", "hybrid", max_capacity=2)
    for key in (1, 2, 1, 3):
        evicting.sparse_read([key])
    assert sok2.export(evicting)[0].numpy().tolist() == [1, 3]


def test_init():
    for comm_tool in ("horovod", "single"):
        sok2.init(comm_tool, use_legacy_optimizer=False)
    with pytest.raises(ValueError, match="`comm_tool` must be one of"):
        sok2.init("mpi")
    assert sok2.tf_version == [int(part) for part in tf.__version__.split(".")[:2]]


def test_tables_are_not_copied_but_checkpointed(tmp_path):
    for variable in (sok2.Variable(TABLE), sok2.DynamicVariable(3, "1", "hbm")):
        with pytest.raises(NotImplementedError):
            copy.deepcopy(variable)
    table, other = (sok2.DynamicVariable(3, "1", "hbm", name="kept") for _ in range(2))
    sok2.assign(table, [4], [[1.0, 2.0, 3.0]])
    path = tf.train.Checkpoint(table=table).write(str(tmp_path / "checkpoint"))
    tf.train.Checkpoint(table=other).read(path).assert_consumed()
    np.testing.assert_array_equal(sok2.export(other)[1], [[1, 2, 3]])


def test_lookup_sparse_returns_what_it_was_given():
    variable = sok2.Variable(TABLE)
    ids = tf.ragged.constant([[0, 2], [], [3]], dtype=tf.int32)
    (mean,) = sok2.lookup_sparse([variable], [ids])
    expected = np.stack([TABLE[[0, 2]].mean(0), np.zeros(3), TABLE[3]])
    np.testing.assert_allclose(mean, expected)
    alone = sok2.lookup_sparse(variable, ids.to_sparse(), combiners="mean")
    np.testing.assert_allclose(alone, expected)
    zero = ids.with_values(tf.constant([1.0, -1.0, 2.0]))
    assert sok2.lookup_sparse(variable, ids, zero)[0].numpy().tolist() == [0, 0, 0]
    hybrid = sok2.DynamicVariable(3, "2", max_capacity=4)
    found = sok2.lookup_sparse(hybrid, ids, use_low_frequency_filter=True)
    np.testing.assert_array_equal(found[2], [2, 2, 2])


@pytest.mark.parametrize(
    "call, error, message",
    [
        (lambda v, ids: ([TABLE], [ids]), TypeError, "must hold sok2.Variables"),
        (lambda v, ids: (v, ids, None, ["mean", "sum"]), ValueError, "each of the 1 tables"),
        (lambda v, ids: ([v, v], [ids]), ValueError, "each of the 2 tables"),
        (lambda v, ids: (v, ids, tf.constant([1.0])), ValueError, "`sp_weights`"),
        (lambda v, ids: (sok2.Variable(TABLE.astype(np.float64)), ids), TypeError, "float64"),
        (lambda v, ids: (v, ids, None, None, True), ValueError, "`use_low_frequency_filter`"),
    ],
)
def test_lookup_sparse_refuses(call, error, message):
    arguments = call(sok2.Variable(TABLE), tf.ragged.constant([[0, 2]], dtype=tf.int64))
    with pytest.raises(error, match=message):
        sok2.lookup_sparse(*arguments)


@pytest.mark.parametrize("as_function", [False, True])
def test_evicted_rows_are_handed_back(as_function):
    table = sok2.DynamicVariable(2, "11", "hybrid", max_capacity=8)
    optimizer = sok2.OptimizerWrapper(tf.keras.optimizers.SGD(1.0))

    def step(keys):
        def loss_of():
            rows, *evicted = sok2.sparse_read_and_evict(table, keys)
            return tf.reduce_sum(rows), rows, *evicted

        return train_step(optimizer, table, loss_of)[1:]

    step = tf.function(step) if as_function else step
    held: dict[int, float] = {}
    rng = np.random.default_rng(4)
    for _ in range(12):
        keys = rng.choice(30, 5, replace=False)
        expected = [held.get(key, 11.0) for key in keys]
        rows, gone, gone_rows = step(tf.constant(keys))
        assert rows.numpy()[:, 0].tolist() == expected
        seen = {key: held.pop(key, 11.0) for key in keys.tolist()}  # the last to leave
        leaving = len(held) + len(seen) - 8
        assert len(gone) == max(leaving, 0)
        for key, row in zip(gone.numpy().tolist(), gone_rows.numpy(), strict=True):
            assert row.tolist() == [held[key]] * 2
            del held[key]
        held |= {key: row - 1 for key, row in seen.items()}
        found = sok2.export(table)
        assert set(found[0].numpy().tolist()) == set(held)


def test_rows_that_cannot_be_handed_back_are_an_error(monkeypatch):
    for variable in (sok2.DynamicVariable(2, "1", "hbm"), sok2.Variable([[1.0]])):
        with pytest.raises(TypeError, match="'hybrid'"):
            sok2.sparse_read_and_evict(variable, [1])
    monkeypatch.setattr("sok_like.sok2.dynamic_variable._MOST_KEPT", 2)
    table = sok2.DynamicVariable(2, "1", "hybrid", max_capacity=4)
    sok2.sparse_read_and_evict(table, [1, 2, 3, 4])
    assert len(sok2.sparse_read_and_evict(table, [5, 6])[1]) == 2
    with pytest.raises(tf.errors.InvalidArgumentError, match="fewer keys at a time"):
        sok2.sparse_read_and_evict(table, [7, 8, 9])


def test_a_dump_of_more_keys_than_fit(tmp_path):
    big = sok2.DynamicVariable(2, "1", "hybrid", max_capacity=8, name="ids")
    sok2.assign(big, [1, 2, 3, 4, 5, 6], tf.ones([6, 2]))
    sok2.dump(str(tmp_path), big)
    small = sok2.DynamicVariable(2, "1", "hybrid", max_capacity=4, name="ids")
    small.sparse_read([7, 8])
    with pytest.warns(UserWarning, match="'ids' holds at most 4 keys on rank 0, and was given 2"):
        sok2.load(str(tmp_path), small)
    assert sok2.export(small)[0].numpy().tolist() == [3, 4, 5, 6]


def test_a_dump_of_keys_that_the_dtype_does_not_hold(tmp_path):
    for dtype, of_others, key in ((tf.uint32, tf.int32, 2**31), (tf.int32, tf.uint32, -1)):
        dumped, table = (
            sok2.DynamicVariable(2, "1", "hbm", key_type=kind, name=f"of_{dtype.name}")
            for kind in (dtype, of_others)
        )
        sok2.assign(dumped, tf.constant([key], dtype), tf.ones([1, 2]))
        sok2.dump(tmp_path, dumped)
        sok2.load(tmp_path, dumped)
        with pytest.raises(ValueError, match=f"has keys of {of_others.name}"):
            sok2.load(tmp_path, table)
        assert len(table) == 0


def test_a_dump_leaves_no_slots_of_an_earlier_one_beside_other_keys(tmp_path):
    table = sok2.DynamicVariable(2, "1", name="ids")
    optimizer = sok2.OptimizerWrapper(tf.keras.optimizers.Adam(0.1))
    sok2.assign(table, [1, 2], tf.ones([2, 2]))
    gradient = tf.IndexedSlices(tf.ones([2, 2]), tf.constant([1, 2], tf.int64))
    optimizer.apply_gradients([(gradient, table)])
    for others in ("ids-Adam-m", "ids_0-Adam-notes"):
        (tmp_path / others).write_text("of somebody else")
    sok2.dump(str(tmp_path), table, optimizer)
    assert (tmp_path / "ids_0-Adam-m").exists()

    again = sok2.DynamicVariable(2, "1", name="ids")
    sok2.assign(again, [3, 4], tf.ones([2, 2]))
    sok2.dump(str(tmp_path), again)
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == ["ids-Adam-m", "ids_0-Adam-notes", "ids_0-key", "ids_0-weight"]
    with pytest.raises(FileNotFoundError, match="ids_0-Adam-m"):
        sok2.load(str(tmp_path), again, sok2.OptimizerWrapper(tf.keras.optimizers.Adam(0.1)))


def test_incremental_model_dump_names_what_does_the_same():
    table = sok2.DynamicVariable(2, "1", "hybrid", max_capacity=4)
    with pytest.raises(NotImplementedError, match="versions"):
        sok2.incremental_model_dump(table, datetime.datetime.now(datetime.timezone.utc))
    table.sparse_read([1, 2])
    table.sparse_read([2, 3])
    rows = table.export()
    assert tf.boolean_mask(rows.keys, rows.versions >= 1).numpy().tolist() == [2, 3]
