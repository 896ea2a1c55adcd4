"""Lookups whose rows and gradients travel in 16 bits, against NumPy; the doors to `wire_dtype`."""

import json

import ml_dtypes
import numpy as np
import pytest
import tensorflow as tf

from tests.checks import wire as checks

DTYPES = {"bfloat16": ml_dtypes.bfloat16, "float16": np.float16}
DOORS = ("all2all", "combined", "group_layer", "group_lookup", "dmp", "dmp_hashed", "dmp_model")


def rounded(values, wire_dtype):
    return values.astype(DTYPES[wire_dtype]).astype(np.float32)


@pytest.mark.ranks
@pytest.mark.keras
@pytest.mark.parametrize("kind, wire_dtype, compiled", checks.TRAINED)
def test_rows_and_gradients_are_rounded(rank_results, kind, wire_dtype, compiled):
    results = rank_results(2, f"wire.{kind}-{wire_dtype}-{compiled}")
    table = checks.values()
    for rank, (found, _) in enumerate(results):
        assert found.tobytes() == rounded(table[checks.keys_of(rank)], wire_dtype).tobytes()
    gradient = np.zeros_like(table)
    for rank in range(2):
        gradient[checks.keys_of(rank)] += rounded(checks.weights_of(rank), wire_dtype)
    # DMP's loss is a mean over ranks.
    trained = table - np.float32(checks.RATE) * gradient / (2 if kind.startswith("dmp") else 1)
    seen = {}
    for _, (keys, rows) in results:
        seen.update(zip(keys.tolist(), rows, strict=True))
    assert sorted(seen) == list(range(checks.KEYS))
    assert all(seen[key].tobytes() == trained[key].tobytes() for key in seen)


@pytest.mark.ranks
def test_failures_arrive_as_they_do_in_floats(rank_results):
    for result in rank_results(2, "wire.failures"):
        assert result["bfloat16"] == result[None]
        out_of_range, fine, full, _ = result["bfloat16"]
        assert out_of_range.startswith("InvalidArgumentError") and "rank 1: " in out_of_range
        assert "99" in out_of_range and "'wire_places_?'" in out_of_range
        assert fine == str([[1.0] * checks.DIM] * 3)
        assert full.startswith("ResourceExhaustedError") and "'wire_full_?'" in full


@pytest.mark.ranks
def test_numbers_too_large_raise_on_all_ranks(rank_results):
    for result in rank_results(2, "wire.overflow"):
        for text in result["row"]:
            assert text.startswith("InvalidArgumentError") and "rank 1: the rows of" in text
            assert "'wire_overflow: 5 none" in text
            assert "' (wire_dtype=float16) must hold numbers" in text
            assert "Received: 70000; wire_dtype='bfloat16' can hold it" in text
        for text in result["gradient"]:
            assert text.startswith("InvalidArgumentError") and "rank 1: the gradients of" in text
            assert "Received: 100000; wire_dtype='bfloat16' can hold it" in text
        # What was infinite before is left to whoever checks for it, a loss scale say.
        assert result["infinite"] == [[1.0] * checks.DIM]
        assert result["after"] == [[2.0] * checks.DIM]  # neither gradient was applied


@pytest.mark.ranks
def test_ranks_that_differ_raise_on_all_ranks(rank_results):
    for result in rank_results(2, "wire.other_dtype"):
        for name, (text, size, after) in result.items():
            assert text.startswith("FailedPreconditionError: all ranks must make the same lookups")
            assert size == 0
            assert after == [[1.0] * checks.DIM] * (2 if isinstance(name, str) else 1)
        for text in (result["none"][0], result["other"][0]):
            assert "rank 0: keys of call 1 of 'wire_other_" in text
            assert text.endswith("(wire_dtype=bfloat16)")
        assert "(wire_dtype=float16); rank 1" in result["other"][0]
        assert result[True][0].endswith("(wire_dtype=float16)")
        assert result[False][0].endswith("(wire_dtype=float16)")


# ---- on one rank ----


@pytest.mark.keras
@pytest.mark.parametrize("kind", DOORS)
def test_one_rank_rounds_nothing(sok, kind):
    look_up, holder, table = checks.door(kind, "alone", "float16")
    if table is not None:
        sok.assign(table, np.arange(checks.KEYS), checks.values())
    else:
        values = checks.values()
        holder.set_weights([(np.arange(checks.KEYS), values) if "hashed" in kind else values])
    keys = checks.keys_of(0)
    assert (look_up(tf.constant(keys)).numpy() == checks.values()[keys]).all()


@pytest.mark.keras
@pytest.mark.parametrize("kind", DOORS)
def test_other_dtypes_raise_where_they_are_given(sok, kind):
    required = "`wire_dtype` must be None or one of .* Received: wire_dtype='int8'"
    who = "lookup 'group_embedding_lookup_sparse'" if kind == "group_lookup" else "layer 'wrong'"
    with pytest.raises(ValueError, match=f"{required}.*{who}"):
        checks.door(kind, "wrong", "int8")[0](tf.constant([1, 2]))


def test_group_embedding_lookup_checks_too(sok):
    with pytest.raises(ValueError, match="wire_dtype='int8' .lookup 'group_embedding_lookup'"):
        sok.group_embedding_lookup(tf.Variable([[1.0]]), [[0]], wire_dtype="int8")


@pytest.mark.keras
@pytest.mark.parametrize("kind", [kind for kind in DOORS if kind != "group_lookup"])
def test_configurations_hold_the_name(sok, kind):
    for given, name in ((tf.bfloat16, "bfloat16"), (np.float16, "float16"), ("float32", None)):
        _, layer, _ = checks.door(kind, f"kept_{name}", given)
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
    from sok_like.lookup.hash_lookup import _DeviceGroup

    group = _DeviceGroup("/device:GPU:0", [], True, "sum", "bfloat16", "on_device")
    with pytest.raises(NotImplementedError, match="must be None for tables in device memory.*GPU"):
        group._exchange(None)
