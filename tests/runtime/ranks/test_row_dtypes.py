"""Row messages in 16 bits: the two ops against NumPy, and which `wire_dtype`s there are."""

import ml_dtypes
import numpy as np
import pytest
import tensorflow as tf

from sok_like.runtime.native import libraries
from sok_like.runtime.ranks import exchange_order
from sok_like.runtime.ranks.lookup_options import check_row_dtype

DTYPES = {"bfloat16": ml_dtypes.bfloat16, "float16": np.float16}
SPECIAL = [0.0, -0.0, np.inf, -np.inf, 1e-45, -1e-40, 5.9e-8, 2.9e-8, 6e-5, 65504.0, 65519.0, -1.0]
HEAD = 16

each_dtype = pytest.mark.parametrize("wire_dtype", DTYPES)


def message(blocks, wire_dtype, name="wire_ops"):
    """A row message as `exchange_rows` takes it."""
    head = exchange_order.head_of_rows(name, wire_dtype).numpy()
    parts = [np.concatenate([head, np.asarray(block, np.float32)]) for block in blocks]
    return np.concatenate(parts), np.array([len(part) for part in parts], np.int32)


def narrow(words, splits):
    return [t.numpy() for t in libraries.ops().sok_narrow_rows(message=words, splits=splits)]


def widen(words, splits):
    return [t.numpy() for t in libraries.ops().sok_widen_rows(narrow=words, narrow_splits=splits)]


def there_and_back(blocks, wire_dtype):
    words, splits = message(blocks, wire_dtype)
    between, between_splits = narrow(words, splits)
    received, received_splits = widen(between, between_splits)
    assert (received_splits == splits).all()
    received = np.split(received, np.cumsum(splits)[:-1])
    for block, before in zip(received, np.split(words, np.cumsum(splits)[:-1]), strict=True):
        assert block[:HEAD].tobytes() == before[:HEAD].tobytes()
    return [block[HEAD:] for block in received], between_splits


@each_dtype
def test_floats_are_rounded_to_nearest_even(wire_dtype):
    rng = np.random.default_rng(0)
    dtype = DTYPES[wire_dtype]
    every = np.arange(2**16, dtype=np.uint16).view(dtype).astype(np.float32)
    every = every[np.isfinite(every)]
    # Ties, which go to the even neighbour, and what lies just beside them.
    ties = ((every[:-1].astype(np.float64) + every[1:]) / 2).astype(np.float32)
    ties = ties[np.isfinite(ties)]
    values = np.concatenate(
        [
            SPECIAL,
            every,
            ties,
            np.nextafter(ties, np.float32(9e4)),
            np.nextafter(ties, np.float32(-9e4)),
            (rng.normal(size=100_001) * 10.0 ** rng.integers(-10, 4, 100_001)),
        ]
    ).astype(np.float32)
    with np.errstate(over="ignore"):
        expected = values.astype(dtype).astype(np.float32)
    fits = np.isfinite(expected) | ~np.isfinite(values)
    values, expected = values[fits], expected[fits]
    (found,), _ = there_and_back([values], wire_dtype)
    assert found.tobytes() == expected.tobytes()


@each_dtype
def test_nan_stays_nan(wire_dtype):
    payload = np.array([0x7FC00000, 0x7F800001, 0xFFFFFFFF], np.uint32).view(np.float32)
    (found,), _ = there_and_back([payload], wire_dtype)
    assert np.isnan(found).all()


@each_dtype
@pytest.mark.parametrize("sizes", [[0, 1, 2, 3], [5], [0, 0], [70_001, 0, 9]])
def test_blocks_of_all_ranks_take_half_as_much(wire_dtype, sizes):
    blocks = [np.arange(size, dtype=np.float32) % 100 for size in sizes]
    found, lengths = there_and_back(blocks, wire_dtype)
    for block, back in zip(blocks, found, strict=True):
        assert (block == back).all()
    assert lengths.tolist() == [HEAD + 1 + (size + 1) // 2 for size in sizes]


def test_floats_and_failures_travel_as_they_are():
    in_floats, splits = message([[1.1, 2.2], [3.3]], None)
    for convert in (narrow, widen):
        found, lengths = convert(in_floats, splits)
        assert found.tobytes() == in_floats.tobytes() and (lengths == splits).all()
    # A text of 8 bytes, whose length is the first word.
    failed, splits = message([np.frombuffer(b"it is so", np.float32)], "float16")
    failed[:1] = np.array([8], np.int32).view(np.float32)
    for convert in (narrow, widen):
        found, lengths = convert(failed, splits)
        assert found.tobytes() == failed.tobytes() and (lengths == splits).all()


@pytest.mark.parametrize("words", [HEAD, HEAD + 2, HEAD + 4])
def test_a_block_of_another_length_raises(words):
    narrowed, _ = narrow(*message([[1.0, 2.0, 3.0]], "float16"))
    block = np.resize(narrowed, words)
    with pytest.raises(tf.errors.InvalidArgumentError, match=f"Received: {words} words"):
        widen(block, np.array([words], np.int32))


@pytest.mark.parametrize(
    "wire_dtype, largest, too_large",
    [
        ("float16", 65519.996, 65520.0),
        ("bfloat16", np.nextafter(np.float32(3.3961775e38), np.float32(0)), 3.3961775e38),
    ],
)
def test_a_number_too_large_is_a_failure(wire_dtype, largest, too_large):
    (found,), _ = there_and_back([[largest, -largest]], wire_dtype)
    assert np.isfinite(found).all()
    for value in (too_large, -too_large):
        words, splits = narrow(*message([[1.0], [2.0, value]], wire_dtype))
        for block in np.split(words, np.cumsum(splits)[:-1]):
            length = block[:1].view(np.int32)[0]
            text = block[HEAD:].tobytes()[:length].decode()
            assert text.startswith("the rows of call ")
            assert f"'wire_ops' (wire_dtype={wire_dtype}) must hold numbers between" in text
            assert f"Received: {value:.6g}" in text
            assert ("wire_dtype='bfloat16'" in text) == (wire_dtype == "float16")


@pytest.mark.parametrize("given", ["float8", "", 16, 14, True, tf.float64, "int8", [], np.int16])
def test_other_dtypes_are_refused(given):
    with pytest.raises(ValueError, match="`wire_dtype` must be .* wire_dtype=.*layer 'x'"):
        check_row_dtype(given, "layer 'x'")
