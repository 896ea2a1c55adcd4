"""A layer of columns on 1 to 3 ranks against stock columns on dense variables in one process."""

import functools

import numpy as np
import pytest
import tensorflow as tf

from tests.checks import columns as checked
from tests.checks import parity

v1 = tf.compat.v1
WORLDS = [1, *(pytest.param(n, marks=pytest.mark.ranks) for n in (2, 3))]


@functools.cache
def _oracle(world_size):
    """Outputs of every step for the whole batch, and rows at the end."""
    fc = v1.feature_column

    def embed(group, column, dimension, combiner):
        del group
        name = column.name.split("_")[0]
        initializer = v1.constant_initializer(checked.rows_of(name))
        return fc.embedding_column(column, dimension, combiner, initializer)

    columns = checked.make_columns(fc, lambda name, has_keys: checked.identity(name), embed)
    with tf.Graph().as_default(), v1.Session() as session:
        placeholders, held = {}, {}
        for name in checked.COLUMNS:
            placeholders[name] = v1.placeholder(tf.int64, [checked.BATCH, 3])
            placeholders[f"{name}_weight"] = v1.placeholder(tf.float32, [checked.BATCH, 3])
        targets = v1.placeholder(tf.float32, [checked.BATCH, 1])
        output = fc.input_layer(placeholders, columns, cols_to_vars=held)
        tables = {column.name.split("_")[0]: variables[0] for column, variables in held.items()}
        slices = tf.gradients(checked.loss_of(output, targets), list(tables.values()))
        # Those of tf.Variables are averaged over ranks, as all ordinary gradients are.
        scales = [1 if checked.COLUMNS[name][-1] else 1 / world_size for name in tables]
        pairs = [
            (tf.convert_to_tensor(s) * scale, table)
            for s, scale, table in zip(slices, scales, tables.values(), strict=True)
        ]
        train = v1.train.AdagradOptimizer(checked.RATE, 0.1).apply_gradients(pairs)
        session.run(v1.global_variables_initializer())
        outputs = []
        for features, values in checked.batches():
            feed = {placeholders[name]: value for name, value in features.items()}
            found, _ = session.run([output, train], {**feed, targets: values})
            outputs.append(found)
        return outputs, session.run(tables)


@pytest.mark.parametrize("world_size", WORLDS)
def test_training_equals_stock_columns(rank_results, world_size):
    outputs, rows = _oracle(world_size)
    for rank, result in enumerate(rank_results(world_size, "columns.train")):
        for step, (ours, right) in enumerate(zip(result["outputs"], outputs, strict=True)):
            mine = parity.ranks_of(step, checked.BATCH, world_size) == rank
            np.testing.assert_allclose(ours, right[mine], rtol=0, atol=1e-5, err_msg=step)
        assert set(result["rows"]) == set(checked.COLUMNS)
        for name, right in rows.items():
            assert np.abs(right - checked.rows_of(name)).max() > 0.02
            np.testing.assert_allclose(result["rows"][name], right, rtol=0, atol=1e-5, err_msg=name)
