"""Masks of padding, beside stock `Embedding(mask_zero=True)`, through what follows the rows."""

import functools
import warnings

import numpy as np
import pytest

from tests.checks import masks as checks

pytestmark = pytest.mark.keras


CASES = [
    pytest.param(*case, marks=pytest.mark.keras(slow=case[1] in ("lstm", "attention")))
    for case in checks.CASES
]


@functools.cache
def stock(head, way, four_axes):
    return checks.trained("stock", head, way, four_axes)


@pytest.mark.parametrize("world_size", [1, pytest.param(2, marks=pytest.mark.ranks)])
@pytest.mark.parametrize("kind, head, way", CASES)
def test_as_stock_models_with_a_mask(rank_results, world_size, kind, head, way):
    results = rank_results(world_size, f"masks.{kind}-{head}-{way}")
    expected = stock(head, way, kind in ("all2all", "fused"))
    for found in results:
        for what in ("before", "evaluated", "after"):
            np.testing.assert_allclose(found[what], expected[what], rtol=1e-4, atol=1e-5)
        if "loaded" in found:
            np.testing.assert_allclose(found["loaded"], found["after"], rtol=1e-5, atol=1e-6)
    assert np.abs(expected["after"] - expected["before"]).max() > 0.01


def test_model_parallel_input(rank_results):
    (found,) = rank_results(1, "masks.model_parallel_input")
    assert found == [[None, [[False, True]]]] * 2


@pytest.mark.ranks
def test_model_parallel_input_of_several_ranks_knows_no_masks(rank_results):
    for errors in rank_results(2, "masks.model_parallel_input"):
        for error, name in zip(errors, ("Embedding", "HashEmbedding"), strict=True):
            assert "must not make masks" in error and f"embeddings[1]: {name}" in error


def test_a_layer_that_loses_the_mask_warns(sok):
    """Of Keras 3 it is Keras' own warning; tf_keras has none."""
    import tensorflow as tf

    rows = sok.All2AllDenseEmbedding(None, 4, slot_num=1, nnz_per_slot=3, pad_key=0)
    ids = tf.constant([[[5, 7, 0]]], tf.int64)
    layer = tf.keras.layers.Reshape([3, 4], name="flat")
    with pytest.warns(UserWarning, match="Layer 'flat' .of type Reshape.*not support masking"):
        layer(rows(ids))
    inputs = tf.keras.Input([1, 3], dtype="int64")
    with pytest.warns(UserWarning, match="not support masking"):
        model = tf.keras.Model(inputs, tf.keras.layers.Reshape([3, 4])(rows(inputs)))
        model(ids)
    with warnings.catch_warnings():  # nothing is lost here
        warnings.simplefilter("error")
        tf.keras.layers.Activation("tanh")(rows(ids))
        tf.keras.layers.Reshape([3, 4])(tf.zeros([1, 1, 3, 4]))
