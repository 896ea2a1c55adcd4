"""`dmp.DistributedEmbedding` against stock layers on one process, on 1 to 4 ranks."""

import functools
import re

import numpy as np
import pytest
import tensorflow as tf

from tests.dist_model_parallel import cases, rank_checks
from tests.dist_model_parallel.worlds import each_world

pytestmark = pytest.mark.keras

TRAININGS = [
    pytest.param(n, name, o, marks=[pytest.mark.ranks] if n > 1 else [], id=f"{n}-{name}-{o}")
    for n in (1, 2, 3, 4)
    for name in cases.CASES
    for o in cases.optimizers(n, name)
]
each_training = pytest.mark.parametrize("world_size, name, optimizer", TRAININGS)


@functools.cache
def _oracle(name, optimizer, world_size):
    return cases.oracle(cases.CASES[name], optimizer, world_size)


@each_training
def test_outputs_of_every_step(rank_results, world_size, name, optimizer):
    expected = _oracle(name, optimizer, world_size)["outputs"]
    for rank, result in enumerate(rank_results(world_size, f"dmp.{name}.{optimizer}")):
        for step in range(cases.STEPS):
            for found, right in zip(result["outputs"][step], expected[step][rank], strict=True):
                tolerance = 1e-6 if step == 0 else 1e-5
                np.testing.assert_allclose(found, right, rtol=1e-6, atol=tolerance)


@each_training
def test_weights_after_training(rank_results, world_size, name, optimizer):
    expected = _oracle(name, optimizer, world_size)
    for rank, result in enumerate(rank_results(world_size, f"dmp.{name}.{optimizer}")):
        for kind in ("tables", "heads"):
            for found, right in zip(result[kind], expected[kind], strict=True):
                np.testing.assert_allclose(found, right, rtol=0, atol=1e-5)
        assert result["on_root"] == (len(expected["tables"]) if rank == 0 else 0)


@each_world
def test_shapes_are_those_of_the_plain_layers(rank_results, world_size):
    for rank, result in enumerate(rank_results(world_size, "dmp.basic.adagrad")):
        for step in range(cases.STEPS):
            batch = len(cases.batch(cases.CASES["basic"], step, rank, world_size)[0])
            assert result["shapes"][step] == [
                (batch, 1, 4), (batch, 8), (batch, 4), (batch, 3, 4), (batch, 6),
                "RaggedTensor", (batch, 4), "RaggedTensor",
            ]  # fmt: skip


@each_world
@pytest.mark.parametrize("name", ["basic", "rows", "columns", "mixed"])
def test_each_element_is_on_one_rank(rank_results, world_size, name):
    case = cases.CASES[name]
    whole = [rows * dim for rows, dim, _ in case.tables]
    copies = [
        world_size if size <= case.arguments.get("data_parallel_threshold", 0) else 1
        for size in whole
    ]
    held = sum(result["elements"] for result in rank_results(world_size, f"dmp.{name}.adagrad"))
    assert held == sum(size * n for size, n in zip(whole, copies, strict=True))


@pytest.mark.ranks
def test_constraints_see_what_they_need(rank_results):
    table = tf.constant(rank_checks.CONSTRAINED)
    of_columns, of_rows = tf.keras.constraints.MaxNorm(0.5), tf.keras.constraints.UnitNorm(axis=1)
    right = {"by columns": of_columns(table), "by rows": of_rows(table), "whole": of_rows(table)}
    ranks = rank_results(2, "dmp.constrained")
    for found in ranks:
        for name, expected in right.items():
            np.testing.assert_allclose(found[name][0], expected, rtol=1e-5)
    sizes = {name: sorted(found[name][1] for found in ranks) for name in right}
    assert sizes == {"by columns": [12, 12], "by rows": [12, 12], "whole": [0, 24]}


@each_world
def test_id_outside_its_table(rank_results, world_size):
    for result in rank_results(world_size, "dmp.out_of_range"):
        for name, message in result.items():
            assert message is not None, name
            assert "items" in message
            assert re.search(rf"[ \[]{name.split()[1]}[ \]]", message)
            if world_size > 1:
                assert f"rank {world_size - 1}:" in message


def _model_parallel_oracle(world_size):
    from tests.dist_model_parallel.rank_checks import MP_INPUTS

    case = cases.Case({}, inputs=MP_INPUTS)
    tables = [tf.Variable(value) for value in cases.table_values(case)]
    heads, outputs = cases.make_heads(case), []
    with tf.GradientTape() as tape:
        for rank in range(world_size):
            ids = cases.batch(case, 0, rank, 1)
            outputs.append(
                [
                    tf.constant(cases.counts(samples, *case.tables[t][::2])) @ tables[t]
                    for (t, *_), samples in zip(case.inputs, ids, strict=True)
                ]
            )
        loss = tf.add_n([cases.loss_of(o, heads) for o in outputs]) / world_size
    gradients = tape.gradient(loss, tables)
    return outputs, [t - 0.005 * g for t, g in zip(tables, gradients, strict=True)]


@each_world
@pytest.mark.parametrize("name", ["basic", "columns"])
def test_model_parallel_input(rank_results, world_size, name):
    outputs, tables = _model_parallel_oracle(world_size)
    for rank, ranks in enumerate(rank_results(world_size, "dmp.model_parallel_inputs")):
        seen = ranks[name]
        for found, right in zip(seen["outputs"], outputs[rank], strict=True):
            np.testing.assert_allclose(found, right, rtol=0, atol=1e-5)
        for found, right in zip(seen["tables"], tables, strict=True):
            np.testing.assert_allclose(found, right, rtol=0, atol=1e-5)
        assert seen["shapes"] == [(4, 1, 4), (4, 8), (4, 4), (4, 3, 4), (4, 6), (4, 2, 4)]
        bad, odd = seen["errors"]
        assert "table 'embedding" in bad
        assert "id 99" in bad
        if world_size > 1:
            assert "rank " in bad
            assert "not divisible by the number of ranks" in odd
        assert "inputs, got" in seen["count"]


@each_world
def test_model_parallel_input_with_an_idle_rank(rank_results, world_size):
    for rank, (out, gradients) in enumerate(rank_results(world_size, "dmp.idle_model_parallel")):
        np.testing.assert_array_equal(out, np.full([2, 1], 2.0))
        (gradient,) = gradients
        assert gradient.tolist() == ([[0], [2], [2]] if rank == 0 else [])


@each_world
def test_weights_from_files_and_weights_that_do_not_fit(rank_results, world_size):
    for seen in rank_results(world_size, "dmp.weights_from_files"):
        assert seen["whole"]
        assert "must hold 5 tables, one per embedding. Received: 4" in seen["short"]
        assert "must hold 5 tables, one per embedding. Received: 6" in seen["long"]
        assert "must have the shape (10, 4). Received: shape (9, 4)" in seen["shape"]
        if world_size > 1:
            assert seen["short"].startswith(f"rank {world_size - 1}: ")
        assert seen["unchanged"]


@each_world
def test_a_batch_known_to_be_empty_in_a_graph(rank_results, world_size):
    ranks = rank_results(world_size, "dmp.empty_constants")
    for rank, (out, _) in enumerate(ranks):
        assert out == ([] if rank == 0 else [[6, 7], [6, 7]])
    # Two samples of two columns on each rank but the first, divided by the number of ranks.
    total = 4 * (world_size - 1) / world_size
    np.testing.assert_allclose(sum(gradient for _, gradient in ranks), total, rtol=1e-6)


@each_world
def test_shards_do_not_start_alike(rank_results, world_size):
    for tables in rank_results(world_size, "dmp.initial_rows"):
        for table in tables:
            assert len(np.unique(table)) == table.size


@each_world
def test_local_variables_are_marked_and_not_broadcast(rank_results, world_size):
    for seen in rank_results(world_size, "dmp.marks"):
        own = len(seen["local"]) - seen["replicated"] if world_size > 1 else 0
        assert sum(seen["local"]) == own
        assert seen["slots"] == 2 * own
        assert seen["kernel"] == world_size
        assert seen["kept"]


def _fit_oracle(world_size):
    """The same training on the joined batch, with stock layers."""
    from tests.dist_model_parallel.rank_checks import fit_data, fit_tables

    tables = []
    for value in fit_tables():
        table = tf.keras.layers.Embedding(*value.shape)
        table.build([None])
        table.set_weights([value])
        tables.append(table)
    head = tf.keras.layers.Dense(1, kernel_initializer="ones")
    head.build([None, 16])
    variables = [layer.trainable_variables for layer in (*tables, head)]
    variables = [v for group in variables for v in group]
    optimizer = tf.keras.optimizers.Adam(0.05)
    data = [fit_data(rank) for rank in range(world_size)]
    for _ in range(2):
        for start in range(0, 16, 4):
            x = np.concatenate([x[start : start + 4] for x, _ in data])
            y = np.concatenate([y[start : start + 4] for _, y in data])
            with tf.GradientTape() as tape:
                parts = [tables[0](x[:, 0]), tables[1](x[:, 1])]
                parts += [tf.reduce_sum(tables[2](x[:, k : k + 2]), 1) for k in (2, 4)]
                loss = tf.reduce_mean((head(tf.concat(parts, 1)) - y) ** 2)
            gradients = [tf.convert_to_tensor(g) for g in tape.gradient(loss, variables)]
            optimizer.apply_gradients(zip(gradients, variables, strict=True))
    return [table.get_weights()[0] for table in tables], head.get_weights()


@each_world
def test_fit_with_other_data_on_each_rank(rank_results, world_size):
    tables, head = _fit_oracle(world_size)
    for seen in rank_results(world_size, "dmp.fit"):
        for found, right in zip(seen["tables"], tables, strict=True):
            np.testing.assert_allclose(found, right, rtol=0, atol=1e-5)
        for found, right in zip(seen["head"], head, strict=True):
            np.testing.assert_allclose(found, right, rtol=0, atol=1e-5)
