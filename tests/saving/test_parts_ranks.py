"""All kinds of state in one file of two ranks; the ranks' part is in checks/parts.py."""

import pytest

from sok_like.runtime.framework.running_keras import is_keras_3

pytestmark = [pytest.mark.ranks, pytest.mark.keras]


def test_what_another_rank_does_not_see_is_not_saved(rank_results):
    for result in rank_results(2, "parts.unshared"):
        for kind in ("dense", "weights", "sok2"):
            assert "must be on a file system that all ranks share" in result[kind], kind
        assert result["left"] == []


def test_one_damaged_byte_of_any_file_raises_on_all_ranks_and_changes_nothing(rank_results):
    for rank, result in enumerate(rank_results(2, "parts.damaged")):
        assert result.pop("loaded") == [True, True]
        assert len(result) == 8 + (rank == 0)
        for name, (file, message, kept) in result.items():
            assert message is not None and kept, (name, message, kept)
            assert file in message or name in ("data", "alone", "optimizer"), (name, message)


def test_a_path_may_have_a_scheme_that_all_ranks_see(rank_results):
    for result in rank_results(2, "parts.schemes"):
        for beside, same, unknown in result["ways"].values():
            assert beside and same and "nowhere" in unknown
        assert result["here"] == set()


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_files_of_version_0_1_are_read(rank_results, num_ranks):
    for result in rank_results(num_ranks, "parts.old"):
        assert result["same"] == ([True] * 2 if is_keras_3() else [])
        if num_ranks == 2:
            assert result["own"] is True
