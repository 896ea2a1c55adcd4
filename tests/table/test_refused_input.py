"""Keys, rows, steps and arguments of a table that are refused, and how the refusal reads."""

import numpy as np
import pytest
import tensorflow as tf

from sok_like.optimizers.rules import OptimizerRule
from sok_like.saving.saver import Saver
from sok_like.sok2.slots import SlotRows
from sok_like.table.variable import unwrap

pytestmark = pytest.mark.keras

FULL = {"record_statistics": True}


@pytest.fixture
def table(sok):
    made = sok.EmbeddingVariable(
        2, name="clicks", initializer="ones", ev_option=sok.EmbeddingVariableOption(**FULL)
    )
    sok.assign(made, [1, 2], [[1, 1], [2, 2]])
    return made


def unchanged(sok, table):
    keys, rows = sok.export(table)
    return keys.numpy().tolist() == [1, 2] and rows.numpy().tolist() == [[1, 1], [2, 2]]


def slices(values, indices):
    return tf.IndexedSlices(tf.constant(values), tf.constant(indices))


@pytest.mark.parametrize("values, indices, message", [
    ([[1.0, 1.0]], [1.5], "indices of 'clicks'.*float32"),
    ([[1.0, 1.0]], ["1"], "indices of 'clicks'.*string"),
    ([[1 + 2j, 1]], [1], "`values` must be real numbers.*complex128.*clicks"),
    ([["a", "b"]], [1], "`values` must be real numbers.*string.*clicks"),
])  # fmt: skip
def test_gradients(sok, table, values, indices, message):
    with pytest.raises(TypeError, match=message):
        OptimizerRule("sgd").apply([(slices(values, indices), table)], 0.1, 1)
    optimizer = sok.OptimizerWrapper(tf.keras.optimizers.SGD(0.1))
    with pytest.raises(TypeError, match=message):
        optimizer.apply_gradients([(slices(values, indices), table)])
    assert unchanged(sok, table)


@pytest.mark.parametrize("rows, received", [
    ([[1j, 1]], "complex128"),
    ([["a", "b"]], "string"),
    ([[True, False]], "bool"),
    ([[1.0, 2.0], [1.0]], "dense tensor of real numbers"),
    (None, "dense tensor of real numbers"),
])  # fmt: skip
def test_rows(sok, table, rows, received):
    with pytest.raises(TypeError, match=f"(?s)`rows` must be .*{received}") as error:
        sok.assign(table, [1], rows)
    assert "'clicks'" in str(error.value)
    assert unchanged(sok, table)


@pytest.mark.parametrize("keys", [
    None, 1.5, "1", [1.0], [True], [[1], [2, 3]], [2**64],
    tf.ragged.constant([[1], [2, 3]]), tf.SparseTensor([[0]], [1], [1]),
])  # fmt: skip
def test_keys(sok, table, keys):
    for call in (
        lambda: sok.assign(table, keys, [[1.0, 1.0]]),
        lambda: table.find(keys),
        lambda: table.erase(keys),
        lambda: table.key_statistics(keys),
    ):
        with pytest.raises(TypeError, match="(?s)[Kk]eys`? must be .*Received: "):
            call()
    assert unchanged(sok, table)


def test_no_keys(sok, table):
    sok.assign(table, [], tf.zeros([0, 2]))
    rows, found = table.find([])
    assert rows.shape == (0, 2) and found.shape == (0,)
    assert int(table.erase(())) == 0
    assert unchanged(sok, table)


@pytest.mark.parametrize("tensors", [[], [[[1j, 2]]], [[["a", "b"]]]])
def test_rows_of_a_dense_table(sok, table, tensors):
    with pytest.raises((TypeError, ValueError), match="(?s)`tensors` must .*'clicks'"):
        Saver().load_embedding_values(table, tensors)
    assert unchanged(sok, table)


def test_steps(table):
    for step in (1.7, tf.constant(2.0), "3", tf.constant(5, tf.uint64)):
        with pytest.raises(TypeError, match="`step` must be of an integer dtype.*clicks"):
            table.set_step(step)
    assert table.statistics().step == 0
    table.set_step(np.int64(4))
    assert table.statistics().step == 4


@pytest.mark.parametrize("initializer", [
    tf.constant_initializer(np.nan),
    tf.keras.initializers.Constant(float("inf")),
    tf.keras.initializers.RandomNormal(0.0, float("nan")),
    lambda shape, dtype=None: tf.fill(shape, np.float32("nan")),
    lambda shape, dtype=None: tf.complex(tf.ones(shape), tf.ones(shape)),
])  # fmt: skip
def test_initializers(sok, initializer):
    with pytest.raises(ValueError, match=r"(?i)`?initializer`? must (give|return) .*numbers"):
        sok.EmbeddingVariable(2, name="clicks", initializer=initializer)


def test_seeds_of_initializers_tell_them_apart(sok):
    # Keras 3 takes a generator besides an integer, tf_keras an integer of NumPy.
    other = getattr(getattr(tf.keras, "random", None), "SeedGenerator", np.int64)

    def first_row(seed):
        uniform = tf.keras.initializers.RandomUniform(seed=seed)
        return sok.EmbeddingVariable(4, name="seeded", initializer=uniform).find([1])[0].numpy()

    assert (first_row(3) == first_row(other(3))).all()
    assert (first_row(3) != first_row(other(4))).all()


@pytest.mark.parametrize("option", [{}, (), 0, "lru", FULL])
def test_options_of_another_kind(sok, option):
    for make in (
        lambda: sok.EmbeddingVariable(2, name="clicks", ev_option=option),
        lambda: sok.get_embedding_variable("clicks", 2, ev_option=option),
    ):
        with pytest.raises(TypeError, match="`ev_option` must be .*EmbeddingVariableOption"):
            make()


@pytest.mark.parametrize("dtype", ["foo", "float32", tf.string, 3.5, "int8"])
def test_dtypes_of_keys(sok, dtype):
    for make in (
        lambda: sok.EmbeddingVariable(2, name="clicks", key_dtype=dtype),
        lambda: sok.get_embedding_variable("clicks", 2, dtype),
        lambda: sok.All2AllDenseEmbedding(None, 2, 1, 1, key_dtype=dtype, name="clicks"),
        lambda: sok.HashEmbedding(2, key_dtype=dtype, name="clicks"),
    ):
        with pytest.raises(ValueError, match="`key_dtype` must be int64, .*Received: key_dtype="):
            make()


@pytest.mark.parametrize("dtype, wide", [("int32", 2**40), ("int32", 2**31), ("uint32", -1)])
def test_keys_that_the_key_dtype_cannot_hold_are_not_returned_as_others(sok, dtype, wide):
    # As int32, 2**40 is 0: weights that are read and set would give key 0 the row of 2**40.
    layer = sok.HashEmbedding(2, key_dtype=dtype, name="narrow")
    whole = sok.dist_model_parallel.DistributedEmbedding([layer])
    whole([tf.constant([0, 7], tf.int64)])
    table = whole.trainable_variables[0]
    assert sok.export(table)[0].numpy().tolist() == [0, 7]
    whole([tf.constant([wide], tf.int64)])
    graph_export = tf.function(lambda: sok.export(table))
    slot = SlotRows(unwrap(table), "m", ["m"], 0.0)
    for read in (lambda: sok.export(table), graph_export, table.numpy, slot.sok2_export):
        with pytest.raises(tf.errors.InvalidArgumentError, match=f"narrow.*has keys of {dtype}"):
            read()
    with pytest.raises(
        (ValueError, tf.errors.InvalidArgumentError), match=f"(?s)Received: key.*{wide}"
    ):
        whole.get_weights()


@pytest.mark.parametrize(
    "arguments, error, words",
    [
        ({"filepath": ""}, ValueError, "`filepath` must be a folder.*'users'"),
        ({"filepath": b"dump"}, TypeError, "`filepath` must be a folder.*b'dump'.*'users'"),
        ({"rows_only": "no"}, TypeError, "`rows_only` must be True or False.*'no'.*'users'"),
    ],
)
def test_what_a_saver_is_given(sok, tmp_path, monkeypatch, arguments, error, words):
    monkeypatch.chdir(tmp_path)
    table, saver = sok.EmbeddingVariable(2, name="users"), sok.Saver()
    calls = [saver.dump_to_file, saver.restore_from_file, saver.restore]
    calls += [] if "rows_only" in arguments else [saver.dump, saver.compact]
    for call in calls:
        with pytest.raises(error, match=words):
            call(table, **{"filepath": tmp_path / "dumps", **arguments})
    assert not list(tmp_path.iterdir())


def test_a_dump_into_a_file_says_so_although_nothing_can_be_undone(sok, tmp_path):
    (tmp_path / "file").write_text("")
    table = sok.EmbeddingVariable(2, name="users")
    with pytest.raises(RuntimeError, match="rank 0: FileExistsError.*dump of table 'users'.*/file"):
        sok.Saver().dump_to_file(table, tmp_path / "file")


def test_what_another_rank_has_copied(sok):
    table = sok.EmbeddingVariable(2, name="copied")
    sok.assign(table, [1], np.ones([1, 2]))
    tensors = table._serialize_to_tensors()
    for line, message in (
        ("sok_like: rank 1 of 2, step 3, decay 1.0", "What rank 1 of 2 has copied of table"),
        ("accumulator", "table 'copied' must say.*save again"),
    ):
        tensors["slot_names"] = tf.constant([line])
        with pytest.raises(ValueError, match=message):
            table._restore_from_tensors(tensors)
    np.testing.assert_array_equal(table.find([1])[0], [[1, 1]])
