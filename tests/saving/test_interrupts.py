"""Ctrl-C, kills and failing disks at some moments of all that writes; more in `make crash`."""

import pytest

from sok_like.saving.format import folders
from sok_like.serving import export
from tests.emulated import on_host
from tests.saving import interrupts

# The moments of each kind that are tried; 4 where nothing is said.
LIMITS = {"finish": 12, "dump": 8, "compact": 2, "backup ends": 3}


@on_host
@pytest.mark.keras(slow=True)
@pytest.mark.parametrize("name", interrupts.CASES)
def test_what_was_published_stays_whole(sok, tmp_path, name):
    counts = interrupts.run(name, tmp_path, LIMITS.get(name, 4))
    assert sum(counts.values()) > 3


def test_a_save_that_was_interrupted_leaves_what_a_copy_of_the_file_needs(tmp_path):
    """Keras' BackupAndRestore copies the file to `.bkp` before it writes the next one."""
    path, saved = str(tmp_path / "model.weights.h5"), []

    def save(interrupted=False):
        saved.append(folders.new_reference("table"))
        (tmp_path / "model.weights.h5.tables" / saved[-1]).mkdir(parents=True)
        folders.may_name(path, saved[-1:])
        if not interrupted:
            folders.remove_others(path, saved[-1:])

    save()
    save(interrupted=True)  # when the file names its tables
    (tmp_path / "model.weights.h5.bkp").touch()  # a copy of that file
    save()
    left = {each.name for each in (tmp_path / "model.weights.h5.tables").iterdir()}
    assert left >= set(saved[1:])
    (tmp_path / "model.weights.h5.bkp").unlink()
    save()
    assert [each.name for each in (tmp_path / "model.weights.h5.tables").iterdir()] == saved[-1:]


@pytest.mark.parametrize("put", [export._rename, export._copy])
@pytest.mark.parametrize("kind", ["fails", "before", "after"])
def test_a_savedmodel_gives_its_place_to_a_whole_one_only(tmp_path, monkeypatch, put, kind):
    monkeypatch.setattr(export, "_rename", put)
    found = []
    for number in range(1, 20):
        folders_of = {name: tmp_path / f"{name}{number}" for name in ("old", "new")}
        for name, folder in folders_of.items():
            (folder / "variables").mkdir(parents=True)
            for file in ("variables/index", "saved_model.pb"):
                (folder / file).write_text(name)
        path = folders_of["old"]
        with interrupts.Operation(number, kind) as moment:
            try:
                export._move(str(folders_of["new"]), str(path))
            except (OSError, KeyboardInterrupt):
                pass
        texts = {each.read_text() for each in path.rglob("*") if each.is_file()}
        found += texts
        assert len(texts) == 1 and len(list(path.rglob("*"))) == 3
    assert moment.count < moment.number and "new" in found
