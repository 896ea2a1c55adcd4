"""Lookups whose rows and gradients travel in 16 bits, against NumPy; the doors to `wire_dtype`."""

import json
import types

import ml_dtypes
import numpy as np
import pytest
import tensorflow as tf

import sok_like as sok
import sok_like.dist_model_parallel as dmp
from tests.training import layer_of, train_step

KEYS, COUNT, DIM, RATE = 40, 24, 5, 0.5
# The door, its wire's dtype, and whether its steps are a function.
TRAINED = [
    ("all2all", "float16", False),
    ("combined", "float16", True),
    ("group_layer", "bfloat16", True),
    ("group_lookup", "bfloat16", False),
    ("dmp_rows", "float16", True),
    ("dmp_hashed", "bfloat16", False),
    ("dmp_model", "bfloat16", True),
]


def values():
    return np.random.default_rng(1).normal(size=[KEYS, DIM]).astype(np.float32)


def keys_of(rank):
    """Each once, so that what a rank sends for a key is one gradient, not a sum."""
    return np.random.default_rng([2, rank]).permutation(KEYS)[:COUNT]


def weights_of(rank):
    return np.random.default_rng([3, rank]).normal(size=[COUNT, DIM]).astype(np.float32)


def all2all(name, wire_dtype, **options):
    return layer_of(name, 1.0, DIM, gradient_scale="sum", wire_dtype=wire_dtype, **options)


def door(kind, name, wire_dtype):
    """`look_up(keys)`, what holds the variables, and the hash table, None where there is none."""
    if kind == "all2all":
        layer = all2all(name, wire_dtype)
        return layer, layer, layer.table
    options = {"gradient_scale": "sum", "wire_dtype": wire_dtype}
    if kind == "combined":
        layer = sok.DistributedEmbedding("mean", None, DIM, 1, 1, name=name, **options)
        return lambda keys: layer(keys[:, None])[:, 0], layer, layer.table
    if kind == "group_layer":
        layer = sok.GroupEmbedding({"f": DIM}, name=name, **options)
        return lambda keys: layer({"f": keys})["f"], layer, layer.tables["f"]
    if kind == "group_lookup":
        table = sok.EmbeddingVariable(DIM, name=name)

        def look_up(keys):
            ids = tf.RaggedTensor.from_uniform_row_length(keys, 1)
            (rows,) = sok.group_embedding_lookup_sparse(table, [ids], "sum", **options)
            return rows

        return look_up, table, table
    description = sok.HashEmbedding(DIM) if kind == "dmp_hashed" else dmp.Embedding(KEYS, DIM)
    layer = dmp.DistributedEmbedding(
        [description],
        row_slice_threshold=1 if kind == "dmp_rows" else None,
        dp_input=kind != "dmp_model",
        wire_dtype=wire_dtype,
        name=name,
    )
    return lambda keys: layer([keys])[0], layer, None


def set_rows(kind, holder, table):
    if table is not None:
        sok.assign(table, np.arange(KEYS), values())
    else:
        holder.set_weights([(np.arange(KEYS), values()) if kind == "dmp_hashed" else values()])


DTYPES = {"bfloat16": ml_dtypes.bfloat16, "float16": np.float16}
DOORS = ("all2all", "combined", "group_layer", "group_lookup", "dmp", "dmp_hashed", "dmp_model")


def rounded(values, wire_dtype):
    return values.astype(DTYPES[wire_dtype]).astype(np.float32)


@pytest.mark.keras(slow=True)
@pytest.mark.parametrize("kind, wire_dtype, compiled", TRAINED)
def test_rows_and_gradients_are_rounded(on_threads, kind, wire_dtype, compiled):
    """The rows of a rank's keys, and all rows that a rank can read after a step."""

    def check():
        rank, table_rows = sok.rank(), values()
        keys, weights = tf.constant(keys_of(rank)), tf.constant(weights_of(rank))
        if kind == "dmp_model":  # a slice of columns on each rank, which gets the keys of both
            keys = tf.constant(np.concatenate([keys_of(0), keys_of(1)]))
        look_up, holder, table = door(kind, f"wire_{kind}_{compiled}", wire_dtype)
        hashed = kind == "dmp_hashed"
        wrap = sok.OptimizerWrapper if hashed or table is not None else dmp.DistributedOptimizer
        optimizer = wrap(tf.keras.optimizers.SGD(RATE))
        set_rows(kind, holder, table)

        def step(keys):
            def loss_of():
                rows = look_up(keys)
                return tf.reduce_sum(rows * weights), rows

            variables = holder if holder is table else holder.trainable_variables
            return train_step(optimizer, variables, loss_of)[1]

        found = (tf.function(step) if compiled else step)(keys).numpy()
        assert found.tobytes() == rounded(table_rows[keys_of(rank)], wire_dtype).tobytes()
        gradient = np.zeros_like(table_rows)
        for sender in range(2):
            gradient[keys_of(sender)] += rounded(weights_of(sender), wire_dtype)
        # DMP's loss is a mean over ranks.
        trained = table_rows - np.float32(RATE) * gradient / (2 if kind.startswith("dmp") else 1)
        own = range(rank, KEYS, 2)
        if table is not None:
            read, rows = (part.numpy() for part in sok.export(table))
        else:
            (rows,), own = holder.get_weights(all_ranks=True), range(KEYS)
            read, rows = rows if hashed else (np.arange(KEYS), rows)
        assert sorted(read) == list(own) and rows.tobytes() == trained[read].tobytes()

    on_threads(2, check)


def test_failures_arrive_as_they_do_in_floats(on_threads):
    """Errors of a lookup in 16 bits; each followed by one that is fine."""

    def check():
        places = all2all("wire_places", "bfloat16", capacity=5, use_hashtable=False)
        full = all2all("wire_full", "bfloat16", capacity=3)
        fine = tf.constant([1, 2, 3], tf.int64)
        outside = tf.constant([1, 99], tf.int64) if sok.rank() else fine
        with pytest.raises(tf.errors.InvalidArgumentError, match="(?s)rank 1: .*99.*'wire_places'"):
            places(outside)
        with pytest.raises(tf.errors.ResourceExhaustedError, match="'wire_full'"):
            full(tf.range(20, dtype=tf.int64))
        for layer in (places, full):
            np.testing.assert_array_equal(layer(fine), np.ones([3, DIM]))

    on_threads(2, check)


def test_numbers_too_large_raise_on_all_ranks(on_threads):
    """A row and a gradient that float16 cannot hold; neither gradient is applied."""
    hint = "; wire_dtype='bfloat16' can hold it"

    def check():
        layer = all2all("wire_overflow", "float16")
        optimizer = sok.OptimizerWrapper(tf.keras.optimizers.SGD(RATE))
        sok.assign(layer.table, [1, 2], [[7e4] * DIM, [2.0] * DIM])

        def step(key, factor):
            def loss_of():
                rows = layer(tf.reshape(key, [1]))
                return tf.reduce_sum(rows) * factor, rows

            return train_step(optimizer, layer.trainable_variables, loss_of)[1]

        one, two, four = (tf.constant(key, tf.int64) for key in (1, 2, 4))
        of_rows = "rank 1: the rows of.*'wire_overflow: 5 none.*' .wire_dtype=float16. must hold"
        for call in (step, tf.function(step)):
            with pytest.raises(
                tf.errors.InvalidArgumentError,
                match=f"(?s){of_rows} numbers.*Received: 70000{hint}",
            ):
                call(one, tf.constant(1.0))
            with pytest.raises(
                tf.errors.InvalidArgumentError,
                match=f"(?s)rank 1: the gradients of.*Received: 100000{hint}",
            ):
                call(two, tf.constant(1e5 if sok.rank() else 1.0))
        # What was infinite before is left to whoever checks for it, a loss scale say.
        np.testing.assert_array_equal(step(four, tf.constant(np.inf)), np.ones([1, DIM]))
        np.testing.assert_array_equal(layer(two[tf.newaxis]), np.full([1, DIM], 2.0))

    on_threads(2, check)


def test_ranks_that_differ_raise_on_all_ranks(on_threads):
    """In `wire_dtype`; the same lookups pass once they agree."""
    same = "(?s)all ranks must make the same lookups.*"

    def check():
        rank, keys = sok.rank(), tf.constant([5, 6], tf.int64)
        for name, pair in {"none": (None, "bfloat16"), "other": ("float16", "bfloat16")}.items():
            layers = [all2all(f"wire_other_{name}", dtype) for dtype in (pair[rank], pair[0])]
            first = f"rank 0: keys of call 1 of 'wire_other_{name}"
            of_first = r"\(wire_dtype=float16\); rank 1.*" if name == "other" else ""
            words = f"{same}{first}.*{of_first}wire_dtype=bfloat16"
            with pytest.raises(tf.errors.FailedPreconditionError, match=words):
                layers[0](keys)
            assert int(layers[0].table.size()) == 0
            np.testing.assert_array_equal(layers[1](keys), np.ones([2, DIM]))
        for dp_input in (True, False):
            layer = dmp.DistributedEmbedding(
                [dmp.Embedding(KEYS, DIM)], dp_input=dp_input, name=f"wire_dmp_{dp_input}"
            )
            layer.set_weights([np.ones([KEYS, DIM], np.float32)])
            layer.wire_dtype = (None, "float16")[rank]
            with pytest.raises(tf.errors.FailedPreconditionError, match=f"{same}dtype=float16"):
                layer([keys])
            layer.wire_dtype = None
            assert (layer([keys])[0].numpy() == 1).all()

    on_threads(2, check)


@pytest.mark.keras
@pytest.mark.parametrize("kind", DOORS)
def test_one_rank_rounds_nothing(sok, kind):
    look_up, holder, table = door(kind, "alone", "float16")
    set_rows(kind, holder, table)
    np.testing.assert_array_equal(look_up(tf.constant(keys_of(0))), values()[keys_of(0)])


@pytest.mark.keras
@pytest.mark.parametrize("kind", DOORS)
def test_other_dtypes_raise_where_they_are_given(sok, kind):
    required = "`wire_dtype` must be None or one of .* Received: wire_dtype='int8'"
    who = "lookup 'group_embedding_lookup_sparse'" if kind == "group_lookup" else "layer 'wrong'"
    with pytest.raises(ValueError, match=f"{required}.*{who}"):
        door(kind, "wrong", "int8")[0](tf.constant([1, 2]))
    with pytest.raises(ValueError, match="wire_dtype='int8' .lookup 'group_embedding_lookup'"):
        sok.group_embedding_lookup(tf.Variable([[1.0]]), [[0]], wire_dtype="int8")


@pytest.mark.keras
@pytest.mark.parametrize("kind", [kind for kind in DOORS if kind != "group_lookup"])
def test_configurations_hold_it(sok, kind):
    for given, name in ((tf.bfloat16, "bfloat16"), (np.float16, "float16"), ("float32", None)):
        _, layer, _ = door(kind, f"kept_{name}", given)
        config = json.loads(json.dumps(layer.get_config()))
        assert config["wire_dtype"] == name
        assert type(layer).from_config(config).wire_dtype == name
        del config["wire_dtype"]  # as files of earlier versions have it
        assert type(layer).from_config(config).wire_dtype is None


@pytest.mark.keras
def test_fused_layers_have_one_dtype(sok):
    keys = tf.keras.Input([1], dtype="int64")

    def model(*dtypes):
        layers = [
            sok.All2AllDenseEmbedding(None, 2, 1, 1, wire_dtype=wire_dtype) for wire_dtype in dtypes
        ]
        return tf.keras.Model(keys, [layer(keys) for layer in layers])

    with pytest.raises(ValueError, match=r"same `wire_dtype`. Received: \[None, 'bfloat16'\]"):
        sok.fuse_lookups(model("bfloat16", None))
    assert len(sok.fuse_lookups(model(None, "float32"))(np.array([[1], [2]]))) == 2


def test_tables_in_device_memory_are_refused():
    from sok_like.lookup.hash_lookup import _exchange

    on_device = types.SimpleNamespace(variable=types.SimpleNamespace(device="/device:GPU:0"))
    with pytest.raises(NotImplementedError, match="must be None for tables in device memory.*GPU"):
        _exchange([on_device], True, "sum", "bfloat16", "on_device")
