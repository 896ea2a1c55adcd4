"""Dumps in the background of one and of two ranks, read by one and by two."""

import numpy as np
import pytest

from tests.saving.test_deltas_ranks import by_key, check_same

pytestmark = [pytest.mark.ranks]


@pytest.mark.parametrize("kind", ["dense", "evicted"])
@pytest.mark.parametrize("writers", [1, 2])
def test_it_has_the_bits_of_its_instant_and_a_delta_follows(rank_results, kind, writers):
    found = rank_results(2, "background.live")
    later, at, base = (
        by_key([result[kind, writers][name] for result in found[:writers]])
        for name in ("later", "at", "read")
    )
    check_same(base, at, f"{kind} {writers}")
    assert not np.array_equal(at["steps"], later["steps"])
    assert len({result[kind, writers]["steps"] for result in found[:writers]}) == 1
    for readers in (1, 2):
        parts = [result[kind, writers, readers] for result in found[:readers]]
        check_same(by_key(parts), later, f"{kind} {writers} {readers}")


def test_an_error_of_one_rank_is_raised_on_both(rank_results):
    for found in rank_results(2, "background.failing"):
        assert len(found["errors"]) == 2 and found["left"]
        for rank, error in enumerate(found["errors"]):
            assert error.startswith(f"rank {rank}: ") and "No space left" in error
        for name, value in found["before"].items():
            np.testing.assert_array_equal(found["read"][name], value, name)


def test_a_backup_in_the_background_has_the_state_of_its_step(rank_results):
    for rank, found in enumerate(rank_results(2, "background.backup")):
        for ranks in range(rank + 1, 3):
            backup = found[ranks]
            assert backup["count"] >= 2 and backup["same"] and backup["end"], backup
            assert backup["step"] == 0
