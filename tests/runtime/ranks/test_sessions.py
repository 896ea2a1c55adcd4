"""Ranks stay in step in `tf.compat.v1` sessions, which know no order but that of the data."""

import numpy as np
import pytest

from tests.checks.sessions import STEPS, WRONG
from tests.ranks import run_ranks
from tests.runtime.ranks.test_exchange_order import check_same_step

pytestmark = pytest.mark.ranks
each_version = pytest.mark.parametrize("version", [2, 1], ids="control_flow_v{}".format)


@pytest.fixture(scope="module")
def results():
    return run_ranks("tests.checks.sessions:main", 2, env={"SOK_STALL_TIMEOUT": "20"})


def test_a_function_that_failed_leaves_ranks_in_the_same_step(results):
    check_same_step([result["function"] for result in results])


@each_version
def test_a_run_that_failed_leaves_ranks_in_the_same_step(results, version):
    fine = [step for step in range(STEPS) if step % 3 != 1]
    for rank, found in enumerate(result[version]["failing"] for result in results):
        for step, seen in enumerate(found["seen"]):
            if step in fine:
                assert seen == [1.0, 3.0, 4.0, 5.0]
            else:
                assert seen.startswith("InvalidArgumentError") and str(WRONG) in seen
                assert f"rank {step % 2}: " in seen
        asked = [100 * r + step for r in range(2) for step in fine]
        assert found["keys"] == [sorted(key for key in asked if key % 2 == rank)] * 3


@each_version
def test_what_is_fetched_is_looked_up_and_nothing_else(results, version):
    for result in results:
        assert result[version]["fetched"] == [[3.0], [2.0, 0.0], [3.0, 2.0, 1.0, 0.0], [1.0]]


@each_version
def test_a_lookup_of_what_another_gave_is_trained(results, version):
    for result in results:
        # Keys 0 and 10 of `first` start at 2, keys 2 and 12 of `second` at 5; gradients 1 and 3.
        assert result[version]["trained"] == [[1.0] * 2, [2.0] * 2]


@each_version
def test_lookups_in_loops_branches_and_functions(results, version):
    for result in results:
        for step, (keys, found) in enumerate(result[version]["looped"]):
            # Row k is k in both of its columns.
            times = np.arange(1, len(keys) + 1)
            loop = sum(n * 2 * row.sum() for n, row in zip(times, keys, strict=True))
            pairs = [(n * m, row + other) for n, row in zip(times, keys, strict=True)
                     for m, other in zip(times, keys, strict=True)]  # fmt: skip
            inner = sum(n * 2 * row.sum() for n, row in pairs)
            assert found == [loop, inner, *(2 * keys[i].sum() for i in range(3))], step


@each_version
def test_a_loop_that_failed_leaves_ranks_in_the_same_step(results, version):
    for result in results:
        for step, seen in enumerate(result[version]["failing_loop"]):
            if step % 3 == 1:
                assert seen.startswith("InvalidArgumentError") and str(WRONG) in seen
                assert f"rank {step % 2}: " in seen
            else:
                total = 2 * (np.arange(8) + step % 3).sum()
                assert seen == [total, 2 * total]
