"""Dense tables and variables whose slices lie on several ranks: no rank gathers one."""

import os
from unittest import mock

import numpy as np
import pytest
import tensorflow as tf

import sok_like as sok
from sok_like.serving import parts
from tests.checks.files import check_same
from tests.checks.serving import OneTable, model_parallel
from tests.saving.test_memory import beside, filled

pytestmark = pytest.mark.keras(slow=True)
on_two = pytest.mark.ranks
ROWS, DIM = 160_000, 128  # of the table whose export is measured
# Rows and length of a row, and the dtype. The thresholds of `Tables` make: one by columns, one on
# a rank alone, three that share a variable, one by rows, one replicated, and one of each dtype.
TABLES = (
    *((40, 9, "float32"), (30, 4, "float32"), (31, 4, "float32"), (32, 4, "float32")),
    *((200, 5, "float32"), (3, 2, "float32"), (210, 4, "bfloat16"), (41, 10, "bfloat16")),
    *((220, 4, "float16"), (42, 9, "float16")),
)


class Tables(tf.Module):
    """Rows of a layer's tables, one of which has two inputs, and of a hash table."""

    def __init__(self, sizes=TABLES, **options):
        super().__init__()
        options = options or {
            "column_slice_threshold": 350,
            "row_slice_threshold": 800,
            "data_parallel_threshold": 6,
        }
        self.sizes = [*sizes, sizes[0]]
        self.layer = sok.dist_model_parallel.DistributedEmbedding(
            [sok.Embedding(n, dim, dtype=dtype) for n, dim, dtype in sizes],
            input_table_map=[*range(len(sizes)), 0],
            **options,
        )
        self.hashed = sok.EmbeddingVariable(4, name="dense_beside")

    @tf.function(input_signature=[tf.TensorSpec([None], tf.int64, "ids")])
    def __call__(self, ids):
        found = self.layer([ids % n for n, *_ in self.sizes])
        rows = {f"rows_{n}": tf.cast(each, tf.float32) for n, each in enumerate(found)}
        return {**rows, "hashed": tf.nn.embedding_lookup(self.hashed, ids)}


def _set(model, seed):
    """Random rows, and what is served of them."""
    rng, keys = np.random.default_rng(seed), np.arange(300)
    drawn = [(rng.normal(size=[n, dim]), dtype) for n, dim, dtype in TABLES]
    values = [tf.cast(each, dtype).numpy().astype(np.float32) for each, dtype in drawn]
    model.layer.set_weights(values)
    rows = rng.normal(size=[300, 4]).astype(np.float32)
    sok.assign(model.hashed, keys, rows)
    expected = [values[n][keys % len(values[n])] for n in [*range(len(TABLES)), 0]]
    return {f"rows_{n}": each for n, each in enumerate(expected)} | {"hashed": rows}


def _check_served(place, names, expected):
    """Rank 0 finds this in a SavedModel after some deltas."""
    if sok.rank() == 0:
        loaded = tf.saved_model.load(place)
        for name in names:
            loaded.signatures["refresh"](delta=tf.constant(name))
        found = loaded.signatures["serving_default"](ids=tf.range(300, dtype=tf.int64))
        check_same({name: value.numpy() for name, value in found.items()}, expected)


def tables(place):
    """A SavedModel, a delta of it and another one have the rows that were set."""
    model = Tables()
    assert len({*model.layer.strategy.plan.kinds}) == (3 if sok.size() > 1 else 1)
    with mock.patch.object(parts, "CHUNK_BYTES", 2500):  # so that there are several parts
        for number in range(3):
            expected = _set(model, 7 * number)
            if number == 1:
                sok.export_delta(model, f"{place}.deltas/1")
            else:  # the second export replaces the first
                sok.export_saved_model(model, place, "zeros", refreshable=True)
            _check_served(place, ["1"] * (number == 1), expected)
    if sok.rank() == 0:
        assert len(tf.io.gfile.listdir(f"{place}/variables")) > 4
        assert tf.io.gfile.listdir(os.path.dirname(place)) == ["tables"]


@on_two
@pytest.mark.parametrize("where", ["shared", "sent"])
def test_a_saved_model_and_its_deltas_have_the_rows_that_were_set(on_processes, tmp_path, where):
    # `ram://` is another file system in each process.
    place = f"{tmp_path}/tables" if where == "shared" else "ram://dense/tables"
    on_processes(2, tables, place)


def _parallel(shape, layouts, dtype):
    """A model with a table, a convolution, a product and a bias under a mesh."""
    with model_parallel(layouts, shape).scope():
        layers = tf.keras.layers
        ids = tf.keras.Input([5], dtype="int64", name="ids")
        rows = layers.Embedding(50, 7, name="dense_items", dtype=dtype)(ids)
        hidden = layers.Flatten()(layers.Conv1D(6, 3, name="dense_conv")(rows))
        model = tf.keras.Model(ids, layers.Dense(4, name="dense_top")(hidden))
        if layouts == LAYOUTS["rows"] and dtype == "float32":
            model.compile(tf.keras.optimizers.Adam(0.1), "mse", run_eagerly=True)
            data = np.random.default_rng(0).integers(0, 50, [12, 5])
            model.fit(data, np.ones([12, 4]), batch_size=12, verbose=0)
        for variable in model.trainable_variables:  # biases are not 0
            variable.assign(tf.cast(variable + 0.5, variable.dtype))
    return model


LAYOUTS = {
    "rows": {
        "dense_items/embeddings": ("model", None),
        "dense_conv.*kernel": ("model", None, None),
    },
    "columns": {
        "dense_items/embeddings": (None, "model"),
        "dense_conv.*kernel": (None, None, "model"),
        "dense_top.*bias": ("model",),
    },
    "middle": {"dense_conv.*kernel": (None, "model", None), "dense_top.*kernel": (None, "model")},
    "batch": {"dense_items/embeddings": ("batch", None)},
    # On a grid of ranks several hold the same shard.
    "grid": {"dense_items/embeddings": ("batch", "model"), "dense_top.*kernel": ("model", None)},
}


def parallel(place, shape, layout, dtype):
    """A SavedModel, and one with a delta, hold exactly the variables of the model."""
    model = _parallel(shape, LAYOUTS[layout], dtype)
    expected = []
    for export in (
        lambda: sok.export_saved_model(model, place, refreshable=True),
        lambda: sok.export_delta(model, f"{place}.deltas/1"),
    ):
        expected.append([np.asarray(tf.convert_to_tensor(v)) for v in model.trainable_variables])
        export()
        for variable in model.trainable_variables:
            variable.assign(tf.cast(variable * 3, variable.dtype) - 1)
    if sok.rank() == 0:
        reader = tf.train.load_checkpoint(f"{place}/variables/variables")
        tensors = map(reader.get_tensor, reader.get_variable_to_shape_map())
        # Beside these: the sequence, the versions and TensorFlow's own, but no slots of Adam.
        assert sum(each.dtype != object and each.ndim > 0 for each in map(np.asarray, tensors)) == 5
        loaded = tf.saved_model.load(place)
        _check_holds(loaded.captured, expected[0])
        loaded.signatures["refresh"](delta=tf.constant("1"))
        _check_holds(loaded.captured, expected[1])


def _check_holds(variables, expected):
    """They have these values, bit for bit."""
    assert all(np.abs(e.astype(np.float32)).max() > 0 for e in expected)
    assert sorted(v.numpy().tobytes() for v in variables) == sorted(e.tobytes() for e in expected)


@pytest.mark.parametrize(
    "shape, layout, dtype",
    [
        ((1, 1), "columns", "float32"),
        *(
            pytest.param((1, 2), *case, marks=on_two)
            for case in [
                *(("rows", "float32"), ("columns", "float32"), ("middle", "float32")),
                ("rows", "bfloat16"),
            ]
        ),
        pytest.param((2, 1), "batch", "float32", marks=on_two),
        pytest.param((2, 2), "grid", "float32", marks=[on_two, pytest.mark.slow]),
    ],
)
def test_it_has_the_variables_of_a_sharded_model_to_the_bit(
    on_processes, tmp_path, shape, layout, dtype
):
    on_processes(shape[0] * shape[1], parallel, f"{tmp_path}/model", shape, layout, dtype)


def peak_of(call):
    """Bytes of rows that this rank writes in parts, and by how much the call raises its peak."""
    save, written = parts._save, []

    def counted(prefix, slices):
        rows = [each.value for each in slices if list(each.shape[1:]) == [128]]
        written.extend(4 * np.prod(v.shape) for v in rows if v.dtype == np.float32)
        return save(prefix, slices)

    chunk = parts.CHUNK_BYTES // 32
    with mock.patch.multiple(parts, _save=counted, CHUNK_BYTES=chunk):
        peak = beside(call)
    return {"peak": peak, "written": int(sum(written))}


def _one_table(**options):
    model = Tables([(ROWS, DIM, "float32")], **options)
    # After a sparse update, a read copies.
    model.layer.set_weights([np.zeros([ROWS, DIM], np.float32)], chunk=1000 * DIM)
    return model


def _one_parallel():
    with model_parallel({"dense_large/embeddings": ("model", None)}).scope():
        ids = tf.keras.Input([2], dtype="int64", name="ids")
        return tf.keras.Model(ids, tf.keras.layers.Embedding(ROWS, DIM, name="dense_large")(ids))


PEAKS = {
    "hash": lambda: OneTable(filled(sok, "large", ROWS, DIM)),
    "rows": lambda: _one_table(row_slice_threshold=1),
    "columns": lambda: _one_table(column_slice_threshold=ROWS * DIM // 2),
    "parallel": _one_parallel,
}


def peak(place, kind):
    """Bytes of a table, those that this rank writes, and by how much calls raise its peak."""
    # What TensorFlow needs once.
    sok.export_saved_model(Tables([(3, DIM, "float32")]), f"{place}_first", "zeros")
    model = PEAKS[kind]()
    found = {"export": peak_of(lambda: export(model, place, refreshable=kind != "hash"))}
    if kind != "hash":
        found["delta"] = peak_of(lambda: sok.export_delta(model, f"{place}.deltas/1"))
    return found


def export(model, place, **options):
    sok.export_saved_model(model, place, "zeros", **options)


@pytest.mark.parametrize(
    "world_size, kind",
    [
        (1, "columns"),
        *(pytest.param(2, k, marks=on_two) for k in ("columns", "hash")),
        *(pytest.param(2, k, marks=[on_two, pytest.mark.slow]) for k in ("rows", "parallel")),
    ],
)
def test_no_rank_holds_a_table_and_each_writes_its_share(on_processes, tmp_path, world_size, kind):
    table, ranks = 4 * ROWS * DIM, on_processes(world_size, peak, f"{tmp_path}/model", kind)
    for call in ranks[0]:
        for rank in ranks:
            assert rank[call]["peak"] < 0.5 * table, (call, rank)
            assert rank[call]["written"] < 1.25 * table / world_size, (call, rank)
        if (call, world_size, kind) != ("export", 1, "columns"):  # which TensorFlow writes
            assert sum(rank[call]["written"] for rank in ranks) == table


def cannot(folder):
    """If rank 1 fails, in a delta and in an export, both raise, and the next has it all."""
    model, place = Tables(), f"{folder}/model"
    _set(model, 1)
    export(model, place, refreshable=True)
    expected, words = _set(model, 2), "(?s)rank 1: .*could not be written: the disk is full"
    own = parts._save
    for what in ("", "spread"):

        def save(prefix, slices, what=what):
            if sok.rank() == 1 and any(each.name.startswith(what) for each in slices):
                raise OSError("the disk is full")
            return own(prefix, slices)

        with mock.patch.object(parts, "_save", save):
            with pytest.raises(ValueError, match=words):
                sok.export_delta(model, f"{place}.deltas/1")
            if sok.rank() == 0:  # which removes the parts, maybe after others have raised
                assert os.listdir(f"{place}.deltas") == []
            with pytest.raises(ValueError, match=words):
                export(model, place, refreshable=True)
    sok.assign(model.hashed, [1], np.full([1, 4], np.nan, np.float32))
    with pytest.raises(ValueError, match="`row_dtype` int8 needs finite rows"):
        export(model, place, row_dtype="int8")
    sok.assign(model.hashed, [1], expected["hashed"][1:2])
    assert sok.export_delta(model, f"{place}.deltas/1").num_rows == 300
    _check_served(place, ["1"], expected)
    assert sorted(os.listdir(folder)) == ["model", "model.deltas"]
    other = Tables(TABLES[: 2 + (sok.rank() == 0)], row_slice_threshold=1)
    with pytest.raises(ValueError, match="Every rank must export a model"):
        sok.export_saved_model(other, place, "zeros")


@on_two
def test_after_a_rank_has_failed_the_next_delta_has_it_all(on_processes, tmp_path):
    on_processes(2, cannot, str(tmp_path))
