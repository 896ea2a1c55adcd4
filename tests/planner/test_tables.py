"""What regularizers and constraints of Keras need whole, by what they make of halves of a table."""

import numpy as np
import pytest
import tensorflow as tf

import sok_like.dist_model_parallel as dmp
from sok_like.planner import DistEmbeddingStrategy, tables

pytestmark = pytest.mark.keras

TABLE = np.random.RandomState(3).normal(size=(6, 4)).astype(np.float32)
regularizers, constraints = tf.keras.regularizers, tf.keras.constraints


class L2(regularizers.L2):  # with the name of the stock class
    def __call__(self, x):
        return tf.reduce_max(tf.reduce_sum(x, 0)) + tf.reduce_max(tf.reduce_sum(x, 1))


class NonNeg(constraints.NonNeg):
    def __call__(self, w):
        return w / tf.reduce_sum(w**2)


def squares_of_sums(w):
    return tf.reduce_sum(w) ** 2


def centred(w):
    return w - tf.reduce_mean(w)


REGULARIZERS = {
    "l1": regularizers.L1(0.1),
    "l2": regularizers.L2(0.1),
    "l1_l2": regularizers.L1L2(0.1, 0.2),
    "rows": regularizers.OrthogonalRegularizer(mode="rows"),
    "columns": regularizers.OrthogonalRegularizer(mode="columns"),
    "own class": L2(0.1),
    "function": squares_of_sums,
}
CONSTRAINTS = {
    "non_neg": constraints.NonNeg(),
    "max_norm": constraints.MaxNorm(1.0),
    "max_norm of rows": constraints.MaxNorm(1.0, axis=1),
    "unit_norm": constraints.UnitNorm(),
    "unit_norm of rows": constraints.UnitNorm(axis=-1),
    "unit_norm of all": constraints.UnitNorm(axis=[0, 1]),
    "min_max_norm": constraints.MinMaxNorm(0.5, 1.0, axis=[1]),
    "own class": NonNeg(),
    "function": centred,
}
ALL = {
    **{f"r {k}": v for k, v in REGULARIZERS.items()},
    **{f"c {k}": v for k, v in CONSTRAINTS.items()},
}


def same_in_halves(reader, axis):
    """Whether its value is that of the whole table if it sees one half of it after the other."""
    halves = [reader(tf.constant(half)) for half in np.split(TABLE, 2, axis)]
    whole = reader(tf.constant(TABLE))
    joined = tf.concat(halves, axis) if tf.rank(whole) else tf.add_n(halves)
    return np.allclose(joined, whole, rtol=1e-5)


@pytest.mark.parametrize("name", ALL)
def test_what_must_be_whole(name):
    """Tables are joined only if it sums over elements."""
    reader = ALL[name]
    needed = {axis for axis in (tables.ROWS, tables.COLUMNS) if not same_in_halves(reader, axis)}
    assert tables.whole_axes(reader) == needed
    layer = _layer(name)
    (config,) = DistEmbeddingStrategy([layer], 2).global_configs
    told = [config[argument] for argument in tables.READERS]
    assert [tables.whole_axes(each) for each in told if each is not None] == [needed]
    if name.startswith(("r l", "c non_neg", "c max_norm")) and "of" not in name:
        assert tables.whole_axes(name[2:]) == needed
    joined = DistEmbeddingStrategy([layer, _layer(name)], 1)
    assert len(joined.local_configs[0]) == (1 if name in ("r l1", "r l2", "r l1_l2") else 2)


def _layer(name):
    argument = tables.READERS[name.startswith("c ")]
    return tf.keras.layers.Embedding(*TABLE.shape, name="table", **{argument: ALL[name]})


@pytest.mark.parametrize("name", ALL)
def test_a_threshold_cuts_it_or_raises(name):
    needed, size = tables.whole_axes(ALL[name]), TABLE.size
    cuts = {0: {"row_slice_threshold": size}, 1: {"column_slice_threshold": size - 1}}
    for axis, threshold in cuts.items():
        if axis in needed:
            with pytest.raises(ValueError) as error:
                DistEmbeddingStrategy([_layer(name)], 2, **threshold)
            for part in (*threshold, str(size), "'table'", tables.READERS[name[0] == "c"]):
                assert part in str(error.value)
        else:
            plan = DistEmbeddingStrategy([_layer(name)], 2, **threshold).plan
            assert len(plan.shards) == 2
    shards = DistEmbeddingStrategy([_layer(name)], 2).plan.shards
    assert len(shards) == (1 if tables.COLUMNS in needed else 2)
    # As the errors say, these leave it whole.
    whole = {"row_slice_threshold": size + 1, "column_slice_threshold": size}
    if tables.COLUMNS in needed:
        assert len(DistEmbeddingStrategy([_layer(name)], 2, **whole).plan.shards) == 1
    replicated = {"row_slice_threshold": size, "data_parallel_threshold": size}
    DistEmbeddingStrategy([_layer(name)], 2, **replicated)
    DistEmbeddingStrategy([_layer(name)], 1, row_slice_threshold=1, column_slice_threshold=1)


@pytest.mark.parametrize("name", ALL)
def test_a_layer_applies_it(name):
    layer = dmp.DistributedEmbedding([_layer(name)])
    layer.build(None)
    layer.set_weights([TABLE])
    reader = ALL[name]
    if name.startswith("r "):
        np.testing.assert_allclose(tf.add_n(layer.losses), reader(tf.constant(TABLE)), rtol=1e-5)
        return
    pairs = [(tf.zeros_like(TABLE), variable) for variable in layer.trainable_variables]
    tf.keras.optimizers.SGD(1.0).apply_gradients(pairs)
    np.testing.assert_allclose(layer.get_weights()[0], reader(tf.constant(TABLE)), rtol=1e-5)
