"""`sok.GroupEmbedding` without a combiner: kinds of features, shared tables, masks."""

import numpy as np
import pytest
import tensorflow as tf

pytestmark = pytest.mark.keras
HISTORY = [[7, 8, 0], [9, 0, 0]]


def rows_of(layer, table, keys):
    """Rows of integers in the shape of `keys`, zeros for 0."""
    keys = np.asarray(keys)
    found = layer.tables[table].find(keys.ravel())[0].numpy().reshape(*keys.shape, -1)
    return np.where(keys[..., np.newaxis] == 0, 0, found)


def mask_of(rows):
    return getattr(rows, "_keras_mask", None)


@pytest.mark.parametrize("combiners", [None, {"candidate": None, "history": None}])
def test_history_and_candidates_share_a_table(sok, combiners):
    layer = sok.GroupEmbedding(
        {"history": 4, "candidate": 4, "others": 4},
        tables=dict.fromkeys(["history", "candidate", "others"], "film"),
        combiners=combiners and {**combiners, "others": "sum"},
        pad_key=0,
    )
    others = tf.ragged.constant([[7, 9], []], dtype=tf.int64)
    inputs = {"history": HISTORY, "candidate": [9, 5], "others": others}
    for call in (layer, tf.function(layer)):
        found = call({k: v if k == "others" else tf.constant(v) for k, v in inputs.items()})
        for name in ("history", "candidate"):
            expected = rows_of(layer, "film", inputs[name])
            np.testing.assert_array_equal(found[name], expected)
        if combiners:
            total = rows_of(layer, "film", [7, 9]).sum(0)
            np.testing.assert_allclose(found["others"], [total, np.zeros(4)], rtol=1e-6)
        else:
            assert isinstance(found["others"], tf.RaggedTensor)
            np.testing.assert_array_equal(found["others"][0], rows_of(layer, "film", [7, 9]))
            assert found["others"].shape == (2, None, 4)
    assert sorted(sok.export(layer.tables["film"])[0].numpy()) == [5, 7, 8, 9]


@pytest.mark.parametrize("kind", ["ragged", "sparse"])
@pytest.mark.parametrize("strings", [False, True])
def test_ragged_and_sparse_features(sok, kind, strings):
    """Positions of padding stay, as zeros that the mask leaves out."""
    ids = tf.ragged.constant([[7, 0, 8], [], [9]], dtype=tf.int64)
    if strings:
        ids = tf.ragged.constant([["x", "", "y"], [], ["x"]])
    layer = sok.GroupEmbedding(
        {"a": 2, "b": 2}, combiners={"a": None}, pad_key="" if strings else 0
    )
    given = ids.to_sparse() if kind == "sparse" else ids
    found = layer({"a": given, "b": given})
    assert found["a"].row_lengths().numpy().tolist() == [3, 0, 1]
    assert found["b"].shape == (3, 2) and mask_of(found["b"]) is None
    assert mask_of(found["a"]).to_list() == [[True, False, True], [], [True]]
    first, last = found["a"][0].numpy(), found["a"][2].numpy()
    assert (first[1] == 0).all() and (first[[0, 2]] != 0).all() and (last != 0).all()
    assert (first[0] == last[0]).all() == strings
    assert int(layer.tables["a"].size()) == (2 if strings else 3)


def test_masks_of_the_features_that_have_padding(sok):
    layer = sok.GroupEmbedding(
        {"history": 2, "words": 2, "user": 2, "tags": 2},
        combiners={"history": None, "words": None, "user": None},
        pad_key=0,
    )
    features = {
        "history": tf.constant(HISTORY, tf.uint64),
        "words": tf.ragged.constant([["0"], ["b", ""]]),  # strings: no padding of their kind
        "user": tf.constant([0, 3]),
        "tags": tf.constant(HISTORY),
        "not asked for": tf.constant([0.5, 1.5]),
    }
    masks = {name: mask_of(rows) for name, rows in layer(features).items()}
    np.testing.assert_array_equal(masks["history"], np.array(HISTORY) != 0)
    np.testing.assert_array_equal(masks["user"], [False, True])
    assert masks["words"] is None and masks["tags"] is None
    combined = sok.GroupEmbedding({"tags": 2}, pad_key=0)({"tags": features["tags"]})
    assert mask_of(combined["tags"]) is None


@pytest.mark.parametrize("shape, dtype", [([3], "int64"), ([None], "string"), ([], "int32")])
def test_symbols_have_the_shape_of_the_rows(sok, shape, dtype):
    layer = sok.GroupEmbedding({"a": 2}, combiners=None, pad_key="" if dtype == "string" else 0)
    rows = layer({"a": tf.keras.Input(shape, dtype=dtype)})["a"]
    assert tuple(rows.shape) == (None, *shape, 2)
    assert tuple(mask_of(rows).shape) == (None, *shape)


def test_nested_ids_are_refused(sok):
    layer = sok.GroupEmbedding({"a": 2}, combiners=None)
    assert mask_of(layer({"a": tf.constant([[1, 0]])})["a"]) is None  # every value is a key
    with pytest.raises(ValueError, match=r"two axes.*feature 'a'"):
        layer({"a": tf.ragged.constant([[[1], [2, 3]]])})
