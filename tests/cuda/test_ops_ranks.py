"""TensorFlow's ops over tables in device memory, on 1, 2 and 3 ranks, under the emulator.

The tests of group lookups are those of tests/group_embedding, against dense tables of stock
TensorFlow; here every table of theirs is in emulated device memory.
"""

import functools
import re

import numpy as np
import pytest
import tensorflow as tf

from tests import emulated
from tests import test_parity as of_parity
from tests.checks import policies
from tests.checks.device_tables import OF_FAILURES
from tests.dist_model_parallel import test_hash_embedding as of_hash_tables
from tests.group_embedding import test_ranks as of_groups
from tests.ranks import run_ranks
from tests.table import test_policies_ranks as of_policies
from tests.test_failures import FAULTS

pytestmark = [
    pytest.mark.ranks,
    pytest.mark.skipif(
        not emulated.LIBRARY.exists(), reason="the emulator comes with the C++ tests"
    ),
]
each_world = pytest.mark.parametrize(
    "world_size",
    [pytest.param(1, marks=pytest.mark.slow), 2, pytest.param(3, marks=pytest.mark.slow)],
)


@functools.cache
def _results(world_size):
    return run_ranks(
        "tests.checks.device_tables:run",
        world_size,
        args={"world_size": world_size},
        env={"SOK_TEST_OPS": "emulated"},
    )


@pytest.fixture
def rank_results():
    def results(world_size, check):
        found = [result[check] for result in _results(world_size)]
        for rank, result in enumerate(found):
            assert type(result).__name__ != "Raised", f"rank {rank}: {result!r}"
        return found

    return results


@pytest.fixture
def on_threads(rank_results):
    """Results of a function by its name, for tests of other modules."""

    def results(world_size, function, *args):
        module = function.__module__.rpartition(".")[2]
        return rank_results(world_size, "_".join([f"{module}.{function.__name__}", *args]))

    return results


# ---- values: the tests of group lookups, with this module's `on_threads` ----

outcome = of_groups.outcome
each_optimizer = pytest.mark.parametrize("optimizer", ["adagrad"])


@each_world
def test_sequences(on_threads, world_size):
    of_groups.test_sequences(on_threads, world_size)


@each_world
def test_gradient_scales(on_threads, world_size):
    of_groups.test_gradient_scales(on_threads, world_size)


@each_world
@each_optimizer
def test_vectors_of_every_step(outcome, world_size):
    of_groups.test_vectors_of_every_step(outcome, world_size)


@each_world
@each_optimizer
def test_rows_after_training(outcome):
    of_groups.test_rows_after_training(outcome)


@pytest.mark.slow
def test_hash_tables_beside_dense_ones(on_threads):
    of_hash_tables.test_training_of_all_kinds_of_tables(on_threads, 2, "adam")
    of_hash_tables.test_training_goes_on_from_weights_and_state(on_threads, 2, "adam")


def test_records_of_keys_that_several_ranks_look_up(on_threads):
    of_policies.check_same_state(*on_threads(1, policies.train), on_threads(2, policies.train))


def test_tables_with_and_without_a_hashtable(rank_results):
    of_parity.check(rank_results(2, "parity.train_adam_sum"), "adam", "sum")


@each_world
def test_tables_on_two_devices_are_trained_as_on_one(rank_results, world_size):
    for result in rank_results(world_size, "two_devices"):
        one = result["one"]
        assert {device[-5:] for device in one["devices"]} == {"CPU:0"}
        for way in ("two_eager", "two_graph"):
            two = result[way]
            assert [device[-1] for device in two["devices"]] == ["1", "0", "1"]
            for step, right in zip(two["found"], one["found"], strict=True):
                for rows, expected in zip(step, right, strict=True):
                    np.testing.assert_array_equal(rows, expected)
            for (keys, rows), (right_keys, right) in zip(two["rows"], one["rows"], strict=True):
                np.testing.assert_array_equal(keys, right_keys)
                np.testing.assert_array_equal(rows, right)
        # A lookup on ranks moved something, and not on every rank at each step.
        assert sum(len(keys) for keys, _ in one["rows"]) > 0


@each_world
def test_a_step_waits_for_the_device_where_it_must(rank_results, world_size):
    """Or where what ranks told is checked: of keys, rows and gradients."""
    for waits in rank_results(world_size, "waits"):
        assert waits == [6 if world_size > 1 else 1] * 3


def test_a_step_makes_at_most_40_launches(rank_results):
    """With one table and with 26, whatever the number of ranks."""
    for counts in rank_results(2, "launches"):
        assert max(sum(parts.values()) for parts in counts.values()) <= 40
        assert counts[26, 8] == counts[26, 64] == counts[26, 200]


# ---- faults ----


@each_world
@pytest.mark.parametrize("mode", ["eager", "graph"])
@pytest.mark.parametrize("fault", OF_FAILURES)
def test_every_rank_gets_the_message(rank_results, fault, mode, world_size):
    kind, message = FAULTS[fault]
    for result in rank_results(world_size, f"failures.{fault}"):
        assert result[mode]["kind"] == kind
        assert re.search(message.format(rows=10 * world_size), result[mode]["message"], re.S)
        assert (result["afterwards"] > 0).all()


@each_world
def test_bad_row_splits_are_told_to_all_ranks(rank_results, world_size):
    texts = {
        "decrease": "row_splits must not decrease. Received: 5 before 4 at sample 1",
        "end": "row_splits must begin with 0 and end with num_keys = 4. Received: 0 and 3",
        "begin": "row_splits must begin with 0 and end with num_keys = 4. Received: 1 and 4",
        "none": "row_splits must hold at least one element",
    }
    for told, sizes, shapes in rank_results(world_size, "bad_row_splits"):
        for name, text in texts.items():
            assert f"{text} (table 'split1')" in told[name]
            if world_size > 1:
                assert f"rank {world_size - 1}: " in told[name]
        assert sizes == (0, 0)  # nothing of a bad batch is in any table
        assert shapes == [[2, 2], [2, 3]]


# ---- what the emulator cannot see: where arguments are ----


def test_handles_texts_and_lengths_are_in_host_memory(rank_results):
    kernels = rank_results(2, "kernels")[0]
    assert {
        *("SokRoute", "SokGatherRows", "SokMergeGrads", "SokCombine", "SokCombineGrad"),
        *("SokLookup", "SokLookupGrad", "SokApplyGradients", "SokTableHandle"),
    } <= set(kernels)
    for op, (in_host_memory, kinds) in kernels.items():
        for name, kind in kinds.items():
            if kind in (tf.resource.as_datatype_enum, tf.string.as_datatype_enum):
                assert name in in_host_memory, (op, name)
    # What Horovod reads and writes there.
    for op, names in {
        "SokRoute": ["counts", "problems", "splits"],
        "SokGatherRows": ["handles", "heads", "row_splits", "splits"],
        "SokMergeGrads": ["grad_splits", "heads", "splits"],
        "SokCombine": ["call", "counts", "splits"],
        "SokCombineGrad": ["call", "counts"],
    }.items():
        assert kernels[op][0] == names
