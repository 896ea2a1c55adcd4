"""Keras' files, checkpoints and sessions of several ranks; the ranks' part is checks/files.py."""

import shutil

import numpy as np
import pytest

from tests.checks import dense_files, files

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


@pytest.mark.keras(slow=True)
@pytest.mark.parametrize(
    "writers, readers",
    [
        *((2, 2), (2, 1), (1, 2)),
        *(pytest.param(*pair, marks=pytest.mark.slow) for pair in [(3, 2), (1, 3), (4, 3), (2, 4)]),
    ],
)
def test_ranks_read_what_any_number_wrote_and_train_on(on_processes, tmp_path, writers, readers):
    written = on_processes(writers, files.write_and_go_on, tmp_path)
    tables = [name for name in written[0][2] if name.endswith(".tables")]
    # A manager keeps two; one rank has its tables among TensorFlow's own files.
    assert tables == (["ckpt-2.tables", "ckpt-3.tables"] if writers > 1 else [])
    for kind in KINDS:
        read = on_processes(readers, files.read_and_go_on, kind, tmp_path)
        for table in written[0][0]:
            before = by_key([before[table] for before, _, _ in written])
            after = by_key([after[table] for after, _ in read])
            assert before.keys() == after.keys() and len(before["keys"])
            for name in before:
                np.testing.assert_array_equal(after[name], before[name], (kind, table, name))
        for rank, (after, predicted) in enumerate(read):
            for table in after.values():
                assert (table["keys"].view(np.uint64) % np.uint64(readers) == rank).all()
            if writers == readers:
                np.testing.assert_array_equal(predicted, written[0][1])
            else:
                np.testing.assert_allclose(predicted, written[0][1], rtol=0, atol=1e-6)


@pytest.mark.keras(slow=True)
def test_ranks_with_paths_of_their_own_raise(on_processes):
    for result in on_processes(2, files.refused):
        for message in result["own"].values():
            assert "All ranks must save to the same path" in message and "MetricAverage" in message


@pytest.mark.keras(slow=True)
def test_a_rank_that_cannot_write_or_read_raises_on_all_and_the_save_before_stays(on_processes):
    for result in on_processes(2, files.refused):
        assert all("rank 1: OSError: [Errno 28]" in message for message in result["full"])
        assert result["left"] == [True, True]
        assert "rank 1: FileNotFoundError" in result["missing"]


@pytest.mark.keras(slow=True)
def test_ranks_that_see_different_files_under_one_path_raise(on_processes):
    for result in on_processes(2, files.refused):
        for message in result["copies"]["messages"]:
            assert "RuntimeError: All ranks must read the same file" in message
        assert result["copies"]["kept"]


def test_keras_backup_in_a_shared_folder_goes_on_with_the_bits_of_an_unbroken_run(on_processes):
    for result in on_processes(2, files.backup):
        assert result["epochs"] == 2 and result["same"] and not result["left"]
        assert "All ranks must save to the same path" in result["own"]


@pytest.mark.slow
@pytest.mark.parametrize("readers", [1, 2])
def test_a_sigterm_saves_and_any_number_of_ranks_goes_on(on_processes, tmp_path, readers):
    for code, same_handler in on_processes(2, files.preempted, tmp_path / "b"):
        assert code == 143 and same_handler
    (expected,) = on_processes(1, files.unbroken)
    copy = shutil.copytree(tmp_path / "b", tmp_path / "copy")  # the ranks still have the first
    for epochs, steps, predicted in on_processes(readers, files.go_on_after, copy):
        assert epochs == 2 and steps == 4
        np.testing.assert_allclose(predicted, expected, rtol=0, atol=1e-6)
    assert not copy.exists()


@pytest.mark.keras(slow=True)
def test_a_monitored_session_resumes_keys_slots_and_step(on_processes):
    for result in on_processes(2, files.session):
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


@pytest.mark.keras(slow=True)
def test_dense_tables_are_written_and_read_by_all_ranks_or_none(on_processes):
    for result in on_processes(2, dense_files.written):
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
