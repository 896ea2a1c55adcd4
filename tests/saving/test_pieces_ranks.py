"""All kinds of state in one file of two ranks; the ranks' part is in checks/pieces.py."""

import pytest

pytestmark = [pytest.mark.ranks, pytest.mark.keras]


def test_what_another_rank_does_not_see_is_not_saved(rank_results):
    for result in rank_results(2, "pieces.unshared"):
        for kind in ("dense", "weights", "sok2"):
            assert "must be on a file system that all ranks share" in result[kind], kind
        assert result["left"] == []


def test_one_damaged_byte_of_any_file_raises_on_all_ranks_and_changes_nothing(rank_results):
    for rank, result in enumerate(rank_results(2, "pieces.damaged")):
        assert result.pop("loaded") == [True, True]
        assert len(result) == 8 + (rank == 0)
        for name, (file, message, kept) in result.items():
            assert message is not None and kept, (name, message, kept)
            assert file in message or name in ("data", "alone", "optimizer"), (name, message)
