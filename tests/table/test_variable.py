"""EmbeddingVariable: what it says of itself, what it holds, and what TensorFlow may do with it."""

import copy
import gc
import os
import pathlib
import pickle

import numpy as np
import pytest
import tensorflow as tf

from sok_like.runtime.ranks import comm
from tests import thread_ranks


@pytest.fixture
def variable(sok):
    return sok.EmbeddingVariable(3, name="users", capacity=100)


def fill(sok, variable, keys=(5, -1, 7)):
    rows = np.arange(len(keys) * variable.dim, dtype=np.float32).reshape(-1, variable.dim)
    sok.assign(variable, np.array(keys, np.int64), rows)
    return rows


# ---- what it says of itself ----


def test_tables_without_a_name_are_numbered(sok):
    first, second = (sok.EmbeddingVariable(4) for _ in range(2))
    assert [each.table_name for each in (first, second)] == ["embedding", "embedding_1"]
    keys = tf.constant([1, 2], tf.int64)
    assert not np.any(first.sparse_read(keys).numpy() == second.sparse_read(keys).numpy())
    with pytest.raises(ValueError, match="table 'embedding'"):
        sok.EmbeddingVariable(0)  # takes no number
    assert sok.EmbeddingVariable(4).get_config()["name"] == "embedding_2"
    assert copy.deepcopy(second).table_name == "embedding_1"
    for _ in range(2):  # each graph has its own, so building one again gives the same names
        with tf.Graph().as_default():
            names = [sok.EmbeddingVariable(4).table_name for _ in range(2)]
        assert names == ["embedding", "embedding_1"]


def test_attributes_size_bytes_and_stats(sok, variable):
    assert (variable.name, variable.table_name) == ("users:0", "users") and variable.trainable
    assert variable.shape == (0, 3) and variable.dim == 3  # of what it holds
    assert (variable.dtype, variable.key_dtype) == (tf.float32, tf.int64)
    assert variable.size().dtype == tf.int64
    assert int(variable.size()) == 0
    empty = int(variable.bytes())
    fill(sok, variable, range(100))
    assert int(variable.size()) == 100
    stats = variable.stats()
    assert stats.size == 100
    assert stats.max_capacity == 100
    assert stats.capacity >= 100
    assert 0 < stats.load_factor <= 1
    assert 1 <= stats.mean_probe_length <= stats.max_probe_length
    assert stats.bytes == int(variable.bytes()) >= max(empty, 100 * 3 * 4)
    assert stats.bytes >= stats.index_bytes + stats.arena_bytes


def test_repr_holds_no_rows(sok, variable):
    fill(sok, variable)
    text = "sok.EmbeddingVariable 'users:0' dim=3 key_dtype=int64"
    held = f"keys=3 bytes={int(variable.bytes()):,} optimizer"
    assert repr(variable) == f"<{text} {held}=None>"
    optimizer = sok.OptimizerWrapper(tf.keras.optimizers.Adam(0.1, name="rows"))
    optimizer.apply_gradients([(tf.IndexedSlices(tf.ones([1, 3]), [5]), variable)])
    assert repr(variable).endswith(" optimizer=rows>")
    shown = []
    tf.function(lambda: shown.append(repr(variable)))()
    assert shown == [f"<{text}>"]


@pytest.mark.parametrize("held", [False, True])
def test_len_and_keys(sok, variable, held):
    table = variable.as_weight() if held else variable
    assert len(table) == 0 and 5 not in table
    fill(sok, variable)
    assert len(table) == 3 == int(variable.size())
    assert 5 in table and np.int32(-1) in table and tf.constant(7) in table and 8 not in table
    assert np.uint64(2**64 - 1) in table  # the bits of -1
    assert len(table) == 3  # nothing was inserted
    with pytest.raises(TypeError):
        bool(table)  # as of any variable, though it has a length
    for key, required in ([5, 7], "takes one key"), ("ann", "sok.keys_of"), (5.0, "integer"):
        with pytest.raises(TypeError, match=required):
            key in table  # noqa: B015
    for function in (list, reversed):
        with pytest.raises(TypeError):
            function(table)

    for ask in table.__len__, lambda: len(table), lambda: table.__contains__(5):
        with pytest.raises(TypeError, match="users"):
            tf.function(lambda ask=ask: ask())()  # AutoGraph has a `len` of its own


def test_keys_of_another_rank(sok):
    def ask():
        table = sok.EmbeddingVariable(2, name="shared")
        sok.assign(table, range(5), tf.ones([5, 2]))
        own, other = (0, 1) if comm.current().rank == 0 else (1, 0)
        assert own in table and own + 8 not in table
        with pytest.raises(ValueError, match=f"key {other} of table 'shared' on rank"):
            other in table  # noqa: B015
        return len(table), repr(table).rpartition(" on ")[2]

    assert thread_ranks.run(2, ask) == [(3, "rank 0>"), (2, "rank 1>")]


def test_config_makes_the_same_variable(sok, variable):
    config = variable.get_config()
    again = sok.EmbeddingVariable(**config)
    assert again.get_config() == config
    assert (again.find([9])[0].numpy() == variable.find([9])[0].numpy()).all()


@pytest.mark.parametrize(
    "argument, value, required, others",
    [
        ("embedding_dim", 0, "a positive integer", {}),
        ("embedding_dim", 2.0, "a positive integer", {}),
        ("name", "", "a string that is not empty", {}),
        ("capacity", 0, "None or an integer in", {}),
        ("capacity", 2**32, "None or an integer in", {}),
        ("capacity", None, "given if use_hashtable is False", {"use_hashtable": False}),
        ("initial_capacity", -1, "an integer >= 0", {}),
        ("initial_capacity", 5, "at most `capacity`, 4", {"capacity": 4}),
    ],
)
def test_arguments_out_of_their_range(sok, argument, value, required, others):
    arguments = {"embedding_dim": 3, "name": "users", argument: value, **others}
    with pytest.raises(ValueError, match=f"`{argument}` must be {required}.*Received: {argument}="):
        sok.EmbeddingVariable(**arguments)


# ---- what it holds ----


def test_find_erase_and_clear(sok, variable):
    initial = variable.find([5, 8])[0].numpy()
    rows = fill(sok, variable)
    found, present = variable.find([7, 8, 5])
    assert present.numpy().tolist() == [True, False, True]
    np.testing.assert_array_equal(found, [rows[2], initial[1], rows[0]])
    assert initial.all() and (np.abs(initial) <= 0.05).all()
    assert int(variable.size()) == 3  # nothing was inserted
    assert int(variable.erase([5, 6])) == 1
    found, present = variable.find([5])
    assert not present.numpy().any() and (found.numpy() == initial[0]).all()  # it starts anew
    assert int(variable.size()) == 2
    variable.clear()
    assert int(variable.size()) == 0


@pytest.mark.parametrize(
    "dtype, keys",
    [
        ("int64", [0, 1, 2, 3, -1, -2, 7, 2**40 + 5, -(2**63), 2**63 - 1, 11, 12]),
        ("int32", [0, 5, -1, -(2**31), 2**31 - 1, 8]),
        ("uint64", [0, 5, 2**64 - 1, 2**63, 2**63 + 5, 8]),
        ("uint32", [0, 5, 2**32 - 1, 2**31, 8, 9]),
    ],
)
def test_assign_and_export(sok, on_threads, dtype, keys):
    """The same full list assigned on all ranks; what each then exports, and what all look up."""
    rows, keys = np.arange(len(keys) * 3.0).reshape(-1, 3), np.array(keys, dtype)

    def check():
        options = {"dynamic_input": True, "key_dtype": dtype, "name": f"assigned_{dtype}"}
        layer = sok.All2AllDenseEmbedding(None, 3, 1, 1, **options)
        sok.assign(layer.embedding_variable, keys, rows)
        assert (layer(tf.constant(keys), training=False).numpy() == rows).all()
        owned, values = (part.numpy() for part in sok.export(layer.embedding_variable))
        assert owned.dtype == keys.dtype
        unsigned = [key % 2**64 for key in owned.tolist()]
        assert all(key % 3 == comm.current().rank for key in unsigned)
        assert unsigned == sorted(unsigned)
        return dict(zip(owned.tolist(), values.tolist(), strict=True))

    exported = {key: row for of_rank in on_threads(3, check) for key, row in of_rank.items()}
    assert exported == dict(zip(keys.tolist(), rows.tolist(), strict=True))


def test_assign_checks_what_it_is_given(sok, variable):
    with pytest.raises(TypeError, match="Keys must be of an integer dtype. Received: float32"):
        sok.assign(variable, [1.0], [[1.0] * 3])
    for keys, rows in ([1, 2], [[1.0] * 3]), ([1], [[1.0] * 4]):
        with pytest.raises(tf.errors.InvalidArgumentError):
            sok.assign(variable, keys, rows)
    for call in (sok.export, lambda v: sok.assign(v, [1], [[1.0]])):
        with pytest.raises(TypeError, match="`variable` must be an EmbeddingVariable. Received"):
            call(tf.Variable([1.0]))


# ---- copies ----


@pytest.mark.keras
@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda v: pickle.loads(pickle.dumps(v))])
@pytest.mark.parametrize("initializer", ["random_uniform", tf.keras.initializers.Constant(2.0)])
def test_copies_hold_the_same_and_live_apart(sok, duplicate, initializer):
    variable = sok.EmbeddingVariable(3, name="users", initializer=initializer)
    rows = fill(sok, variable)
    copied = duplicate(variable)
    sok.assign(variable, [5, 6], np.zeros([2, 3]))
    keys, values = sok.export(copied)
    assert keys.numpy().tolist() == [5, 7, -1]
    assert (values.numpy() == rows[[0, 2, 1]]).all()
    assert (copied.find([99])[0].numpy() == variable.find([99])[0].numpy()).all()
    assert copied.table_name == "users"


# ---- what TensorFlow may do with it ----


@pytest.mark.keras
def test_a_variable_that_is_not_trainable_has_no_gradient(sok):
    layer = sok.All2AllDenseEmbedding(None, 2, 1, 1, dynamic_input=True, trainable=False)
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(layer(tf.constant([1], tf.int64)))
    assert tape.gradient(loss, layer.embedding_variable) is None
    assert not layer.trainable_variables


def test_assignments_name_what_to_use(variable):
    for call in (variable.assign, variable.assign_add, variable.scatter_update):
        for value in (1.0, np.zeros([32, 3], np.float32)):
            with pytest.raises(
                NotImplementedError, match="'users'.*by position.*sok.assign.*Wrapper"
            ):
                call(value)


@pytest.mark.keras
def test_batches_of_many_sizes_need_one_trace(sok):
    layer = sok.DistributedEmbedding("sum", None, 2, slot_num=2, max_nnz=1)
    traces = []

    @tf.function(input_signature=[tf.TensorSpec([None, 2], tf.int64)])
    def call(keys):
        traces.append(1)
        return layer(keys)

    @tf.function
    def retraced(keys):
        return layer(keys)

    for batch in (0, 1, 4, 2):
        keys = tf.zeros([batch, 2], tf.int64)
        assert call(keys).shape == retraced(keys).shape == (batch, 2, 2)
    assert len(traces) == 1
    assert int(layer.table.size()) == 1


def test_the_table_dies_with_its_variable(sok):
    def resident():
        pages = int(pathlib.Path("/proc/self/statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE")

    rows = np.ones([100_000, 64], np.float32)  # 26 MB
    sizes = []
    gc.freeze()  # what other tests left need not be searched ten times
    for _ in range(10):
        variable = sok.EmbeddingVariable(64, name="short_lived")
        assert int(variable.size()) == 0
        sok.assign(variable, np.arange(len(rows)), rows)
        sizes.append(resident())
        del variable
        gc.collect()
    assert sizes[-1] < sizes[1] + 3 * rows.nbytes
