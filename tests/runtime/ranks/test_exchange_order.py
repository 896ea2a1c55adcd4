"""Ranks stay in step: whole lookups in one order, and no exchange with another call's data."""

import numpy as np
import pytest

from tests.checks import programs, steps
from tests.ranks import run_ranks

pytestmark = pytest.mark.ranks

each_world = pytest.mark.parametrize("world_size", [2, pytest.param(3, marks=pytest.mark.slow)])


@each_world
def test_calls_in_different_order_raise_on_all_ranks(on_processes, world_size):
    for result in on_processes(world_size, steps.eager_order):
        for error in result["seen"]:
            assert error.startswith("FailedPreconditionError")
            assert (
                "of 'order_a: 2 none" in error
                and "of 'order_b: 2 none" in error
                and "rank 1:" in error
            )
        assert result["sizes"] == {"order_a": 0, "order_b": 0}
        assert (result["after"]["order_a"] == 1.0).all()
        assert (result["after"]["order_b"] == 2.0).all()


@each_world
def test_after_an_error_ranks_are_in_the_same_step(on_processes, world_size):
    check_same_step(on_processes(world_size, steps.after_an_error))


def check_same_step(results):
    """What `steps.after_an_error` must have found on each rank."""
    world_size = len(results)
    fine = [number for number in range(12) if number % 3 != 1]
    for rank, result in enumerate(results):
        for number, seen in enumerate(result["seen"]):
            if number in fine:
                rows, other = seen
                assert (rows == 1.0).all() and (other == 3.0).all()
            else:
                assert seen.startswith("InvalidArgumentError") and f"rank {number % 2}: " in seen
        # No key of a step that failed, and each key of the others on its owner.
        asked = [100 * r + number for r in range(world_size) for number in fine]
        assert result["keys"] == sorted(k for k in asked if k % world_size == rank)


@each_world
def test_a_gradient_waits_for_its_lookup(on_processes, world_size):
    for result in on_processes(world_size, steps.full_table_without_value):
        for number, seen in enumerate(result):
            if number % 2:
                assert seen.startswith("ResourceExhaustedError") and "'no_value'" in seen
            else:
                assert (seen[1] == world_size).all()


@each_world
def test_lookups_in_a_loop(on_processes, world_size):
    results = on_processes(world_size, steps.while_loop)
    for seen, _ in results:
        assert seen == [(2.0, 2 * 2.0 * sum(range(6)), 2.0)] * 3
    assert sum(size for _, size in results) == 6 * world_size


def test_what_a_graph_knows_beforehand_travels_too(on_processes):
    first, others = on_processes(2, steps.constant_on_one_rank)
    for (rows, *_), num_rows in zip(first, [1, 0], strict=True):
        np.testing.assert_array_equal(rows, np.full([num_rows, 2], 3.0))
    for (rows, keys, gradient), expected in zip(others, [[5, 7], [7]], strict=True):
        np.testing.assert_array_equal(rows, np.full([1, 2], 3.0))
        np.testing.assert_array_equal(np.sort(keys), expected)  # odd keys are rank 1's
        np.testing.assert_array_equal(gradient, np.ones([len(expected), 2]))


@each_world
def test_a_gradient_outside_of_its_function(on_processes, world_size):
    results = on_processes(world_size, steps.gradient_outside)
    for i in range(3):
        sums = {}
        for result in results:
            indices, values = result[i]
            sums.update(zip(indices.tolist(), values[:, 0].tolist(), strict=True))
        assert sums == {1: (i + 1.0) * world_size, 2: 2 * (i + 1.0) * world_size}


@each_world
def test_a_function_meets_an_eager_lookup(on_processes, world_size):
    for result in on_processes(world_size, steps.function_meets_eager):
        np.testing.assert_array_equal(result, np.full([2, 2], 4.0))


@each_world
@pytest.mark.parametrize("what", ["width", "order", "initializer", "combiner"])
def test_tables_that_differ_over_ranks_raise_on_all(on_processes, world_size, what):
    for result in on_processes(world_size, steps.other_tables):
        seen, size = result[what]
        assert seen.startswith("FailedPreconditionError") and size == 0
        first, other = {
            "width": ("wide: 2 none", "wide: 3 none"),
            "order": ("swapped: one 2 none", "swapped: two 2 none"),
            "initializer": ("begun: 2 none of constant 1 0'", "begun: 2 none of constant 0 0'"),
            "combiner": ("fields: 2 sum of ", "fields: 2 mean of "),
        }[what]
        assert f"rank 0: keys of call 1 of '{first}" in seen
        assert f"rank 1: keys of call 1 of '{other}" in seen


@each_world
def test_dense_tables_that_differ_over_ranks_raise_on_all(on_processes, world_size):
    for result in on_processes(world_size, steps.other_dense_tables):
        for name, seen in result.items():
            assert seen.startswith("FailedPreconditionError")
            stage = "notes" if name == "own_inputs" else "keys"
            size = "" if name == "initializers" else "6x"
            assert f"rank 0: {stage} of call 1 of '{name}: {size}" in seen
        assert "; rank 1: keys of call 1 of 'rows: 5x" in result["rows"]


@each_world
def test_a_lookup_that_meets_something_else_names_both(on_processes, world_size):
    for result in on_processes(world_size, steps.notes_out_of_step):
        assert result.startswith("FailedPreconditionError")
        assert "keys of call 1 of 'alone: 2 none" in result and "notes of call" in result
        assert "'something_else'" in result


@each_world
def test_eager_collectives_in_different_order_raise_on_all_ranks(on_processes, world_size):
    names = [("dense_a", "dense_b"), ("dense_c", "kernel"), ("first_0", "dense_d")]
    names.append(("met_by_a_sum", "dense_e"))
    names.append(("sok_get_frequency_counted", "sok_get_version_counted"))
    names.append(("export of table 'served'", "export of table 'kept'"))
    for rank, result in enumerate(on_processes(world_size, steps.collectives_out_of_order)):
        for pair, errors in zip(names, result["seen"], strict=True):
            for error in errors:
                assert error.startswith("FailedPreconditionError")
                assert all(f"of '{name}" in error for name in pair) and "rank 1:" in error
        assert (result["after"] == world_size * (world_size + 1) / 2).all()
        assert (result["kept"] == 1.0 + rank).all()


@each_world
def test_random_programs_give_what_a_dictionary_gives(on_processes, world_size):
    results = on_processes(world_size, programs.run, 1, programs.num_steps(world_size))
    assert all(result == results[0] for result in results)
    assert sum(results[0].values()) == programs.num_steps(world_size)
    assert {"eager fine", "function fine", "loop fine"} <= set(results[0])
    if world_size == 2:
        assert all(any(wrong in how for how in results[0]) for wrong in ("rows", "full", "dmp"))


@each_world
def test_random_runs_of_a_session_give_what_a_dictionary_gives(on_processes, world_size):
    results = on_processes(world_size, programs.run_in_session, 1, programs.SESSION_STEPS)
    assert all(result == results[0] for result in results)
    assert sum(results[0].values()) == programs.SESSION_STEPS
    assert "session fine" in results[0] and len(results[0]) > 1


@pytest.fixture(scope="module")
def in_rounds():
    """What 2 ranks found that exchange at most 150 words of a block at once."""
    env = {"SOK_EXCHANGE_LIMIT": "300", "SOK_BLOCK_LIMIT": "4000"}
    return run_ranks("tests.checks.rounds:main", 2, env=env)


def test_an_exchange_beyond_the_transport_takes_several_rounds(in_rounds):
    for result in in_rounds:
        assert result["hashed"] == {mode: [True] * 4 for mode in ("eager", "function", "loop")}
        assert result["narrow"] == [True] * 4
        assert result["dense"] == {f"dp_input={dp}": [True] * 3 for dp in (True, False)}
        assert result["programs"] == in_rounds[0]["programs"]
        assert sum(result["programs"].values()) == 12


def test_errors_of_exchanges_in_rounds_are_raised_on_all_ranks(in_rounds):
    for result in (each["failures"] for each in in_rounds):
        error, after = result["out_of_range"]
        assert "InvalidArgumentError" in error and "rank 1: " in error and "2000" in error
        assert after == 1.0
        error, after = result["full"]
        assert "ResourceExhaustedError" in error and "'rounds_full'" in error and after == 1.0
        first, second, after = result["crossed"]
        for error in (first, second):
            assert "FailedPreconditionError" in error and "'rounds_other" in error
        assert after == 1.0


def test_a_block_beyond_what_is_counted_is_an_error_on_all_ranks(in_rounds):
    for result in (each["failures"] for each in in_rounds):
        error, after = result["block"]
        assert "InvalidArgumentError" in error and "rank 1: the message from one rank" in error
        assert "at most 4000 words" in error and after == 1.0
        error, after = result["block_of_rows"]
        assert "ResourceExhaustedError" in error and "at most 4000 words" in error and after == 1.0
        for dp_input in (True, False):
            assert "at most 4000 words" in result[f"dp_input={dp_input}"]
