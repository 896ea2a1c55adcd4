"""Keras' files, checkpoints and sessions of several ranks; the ranks' part is checks/files.py."""

import numpy as np
import pytest

from tests.checks.files import GRID

pytestmark = [pytest.mark.ranks, pytest.mark.keras]
KINDS = ("checkpoint", "weights", "model")


def by_key(parts):
    """Arrays of one table, of all ranks, in the order of the keys."""
    keys = np.concatenate([part["keys"] for part in parts])
    order = np.argsort(keys)
    arrays = {"keys": keys[order]}
    for name in ("rows", "slot_rows", "records"):
        filled = [part[name] for part in parts if len(part["keys"])] if name in parts[0] else []
        if filled:
            arrays[name] = np.concatenate(filled)[order]
    if "waiting" in parts[0]:
        waiting = np.concatenate([part["waiting"] for part in parts])
        arrays["waiting"] = waiting[np.argsort(waiting[:, 0])]
    return arrays


def check_resumed(found, pairs):
    for writers, readers in pairs:
        written = [result["written"][writers] for result in found[:writers]]
        for kind in KINDS:
            read = [result["read"][writers, readers, kind] for result in found[:readers]]
            for table in written[0][0]:
                before = by_key([before[table] for before, _, _ in written])
                after = by_key([after[table] for after, _ in read])
                assert before.keys() == after.keys() and len(before["keys"])
                for name in before:
                    np.testing.assert_array_equal(after[name], before[name], (kind, table, name))
            for rank, (after, predicted) in enumerate(read):
                for table in after.values():
                    assert (table["keys"].view(np.uint64) % np.uint64(readers) == rank).all()
                expected = written[0][1]
                if writers == readers:
                    np.testing.assert_array_equal(predicted, expected)
                else:
                    np.testing.assert_allclose(predicted, expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize("pair", [(2, 2), (2, 1), (1, 2)])
def test_two_ranks_read_what_one_or_two_wrote_and_train_on(rank_results, pair):
    check_resumed(rank_results(2, "files.resumed"), [pair])


@pytest.mark.slow
@pytest.mark.parametrize("pair", [(3, 2), (1, 3), (3, 3)])
def test_three_ranks_read_and_write_as_well(rank_results, pair):
    check_resumed(rank_results(3, "files.resumed"), [pair])


@pytest.mark.slow  # with SLOW=1, as `make test-all` sets it
@pytest.mark.parametrize("pair", GRID)
def test_up_to_four_ranks_read_what_any_of_them_wrote(rank_results, pair):
    check_resumed(rank_results(4, "files.resumed"), [pair])


def test_a_manager_removes_the_tables_of_the_checkpoints_that_it_removes(rank_results):
    files = rank_results(2, "files.resumed")[0]["written"][2][2]
    tables = [name for name in files if name.endswith(".tables")]
    assert tables == ["ckpt-2.tables", "ckpt-3.tables"]


def test_ranks_with_paths_of_their_own_raise(rank_results):
    for result in rank_results(2, "files.refused"):
        for message in result["own"].values():
            assert "All ranks must save to the same path" in message and "MetricAverage" in message


def test_a_rank_that_cannot_write_or_read_raises_on_all_and_the_save_before_stays(rank_results):
    for result in rank_results(2, "files.refused"):
        assert all("rank 1: OSError: [Errno 28]" in message for message in result["full"])
        assert result["left"] == [True, True]
        assert "rank 1: FileNotFoundError" in result["missing"]


def test_ranks_that_see_different_files_under_one_path_raise(rank_results):
    for result in rank_results(2, "files.refused"):
        for message in result["copies"]["messages"]:
            assert "RuntimeError: All ranks must read the same file" in message
        assert result["copies"]["kept"]


def test_keras_backup_in_a_shared_folder_goes_on_with_the_bits_of_an_unbroken_run(rank_results):
    for result in rank_results(2, "files.backup"):
        assert result["epochs"] == 2 and result["same"] and not result["left"]
        assert "All ranks must save to the same path" in result["own"]


@pytest.mark.slow  # with SLOW=1, as `make test-all` sets it
def test_a_sigterm_saves_and_any_number_of_ranks_goes_on(rank_results):
    results = rank_results(2, "files.preempted")
    for result in results:
        assert result["code"] == 143 and result["handler"] and not result["left"]
        assert result["epochs"] == 2 and result["steps"] == 4
    assert results[0]["alone"] == 2 and results[0]["difference"] < 1e-6


def test_a_monitored_session_resumes_keys_slots_and_step(rank_results):
    for result in rank_results(2, "files.session"):
        first, unbroken = result["unbroken"]
        again, resumed = result["resumed"]
        assert (first, again, unbroken[-1]) == (0, 3, 6)
        assert len(unbroken[0]) == 12 and np.abs(unbroken[2]).max() > 0
        for mine, expected in zip(resumed, unbroken, strict=True):
            np.testing.assert_array_equal(mine, expected)
        assert "model.ckpt-6.tables" in result["files"]
        assert "RuntimeError: All ranks must read the same file" in result["copy"]
        first, by_time, saved = result["by_time"]
        assert first == 0 and saved == list("23456")
        for mine, expected in zip(by_time, unbroken, strict=True):
            np.testing.assert_array_equal(mine, expected)


def test_dense_tables_are_written_and_read_by_all_ranks_or_none(rank_results):
    for result in rank_results(2, "dense_files.written"):
        (weights, slots), (again, slots_again) = result["states"]
        for mine, expected in zip(again, weights, strict=True):
            np.testing.assert_array_equal(mine, expected)
        assert slots["iterations"] == slots_again["iterations"] == 2
        for mine, expected in zip(slots_again["tables"], slots["tables"], strict=True):
            assert mine.keys() == expected.keys() and len(mine) == 2
            for name in mine:
                np.testing.assert_array_equal(mine[name], expected[name])
        assert all("All ranks must save to the same path" in text for text in result["own"])
        written, read = result["failed"]["messages"]
        assert "rank 1: " in written and "No space left on device" in written
        assert "must lie beside the file that is read" in read and "1-of-2.npz" in read
        assert result["failed"]["kept"] and result["failed"]["same"]
        assert all("ends in '.weights.h5'" in text for text in result["h5"])
        assert not result["h5 file"]
        assert "`overwrite=False` the file must not exist" in result["twice"]
        assert result["skipped"] == (None, True)
        (first, second), (expected, found) = result["renamed"]
        assert first != second
        np.testing.assert_array_equal(found, expected)
