"""Arrays of several ranks in one folder: every byte is covered, and errors name the file."""

import pathlib

import numpy as np
import pytest

from sok_like.saving.format import array_files
from tests.checks.files import is_same
from tests.saving import fuzz


def unread(arrays):
    return {
        name: array_files.Unread(np.shape(array), np.asarray(array).dtype, array.copy)
        for name, array in arrays.items()
    }


def written(folder, seed=3):
    rng = np.random.default_rng(seed)
    names = [[f"id,{rank},{i}" for i in range(2)] for rank in range(2)]
    arrays = [{name: rng.normal(size=[3, 4]).astype("f") for name in of} for of in names]
    entries = [array_files.write(folder, rank, 2, unread(a)) for rank, a in enumerate(arrays)]
    array_files.finish(folder, entries)
    return arrays


def read(folder):
    files, found = array_files.Folder(folder, 2), []
    files.check(range(2))
    for rank in range(2):
        with files.open(rank) as archive:
            found.append({name: archive[name] for name in archive.files})
    return found


def test_numpy_and_this_module_read_what_was_written(tmp_path):
    arrays = written(str(tmp_path))
    np.testing.assert_equal(read(str(tmp_path)), arrays)
    with np.load(tmp_path / "1-of-2.npz") as archive:
        np.testing.assert_equal(dict(archive), arrays[1])
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        *("0-of-2.npz", "1-of-2.npz", "files.json")
    ]


def test_any_changed_bytes_raise_or_change_nothing(tmp_path):
    arrays = dict(enumerate(written(str(tmp_path))))

    def outcome():
        try:
            found = dict(enumerate(read(str(tmp_path))))
        except (ValueError, OSError) as error:
            return "refused" if str(tmp_path) in str(error) else repr(error)
        return "right" if is_same(found, arrays) else "another content"

    files = sorted(tmp_path.iterdir())
    counts, wrong = fuzz.damaged(files, [fuzz.mutate_bytes], 450, 5, outcome)
    assert not wrong and sum(counts[key] for key in counts if key[1] == "refused") > 350


@pytest.mark.parametrize("name", ["0-of-2.npz", "1-of-2.npz", "files.json"])
@pytest.mark.parametrize("size", [None, 0, 100])
def test_a_missing_or_short_file_is_named(tmp_path, name, size):
    written(str(tmp_path))
    path = pathlib.Path(tmp_path, name)
    path.write_bytes(path.read_bytes()[:size]) if size is not None else path.unlink()
    with pytest.raises((ValueError, OSError), match=name):
        read(str(tmp_path))


def test_the_list_or_a_file_of_another_save_is_not_taken(tmp_path):
    for seed, folder in enumerate(("one", "other")):
        written(str(tmp_path / folder), seed)
    for name in ("files.json", "1-of-2.npz"):
        mine, others = (tmp_path / folder / name for folder in ("one", "other"))
        whole = mine.read_bytes()
        mine.write_bytes(others.read_bytes())
        with pytest.raises(ValueError, match="a different checksum"):
            read(str(tmp_path / "one"))
        mine.write_bytes(whole)
    for size, match in {1: "of another save", 2: r"files\.json .*of another version; save"}.items():
        names = [f"{rank}-of-{size}.npz" for rank in range(size)]
        entries = [{"file": name, "bytes": 1, "sha256": ""} for name in names]
        array_files.finish(str(tmp_path / "one"), entries)
        with pytest.raises(ValueError, match=match):
            read(str(tmp_path / "one"))


def test_any_name_and_shape_but_no_objects(tmp_path):
    arrays = {"größe": np.arange(3), "a/b": np.float64(3.5), "none": np.zeros([0, 4], "f")}
    array_files.write(str(tmp_path), 0, 1, unread(arrays))
    with np.load(tmp_path / "0-of-1.npz") as archive:
        np.testing.assert_equal(dict(archive), arrays)
    texts = {"texts": array_files.Unread((1,), object, lambda: np.array([b"x"], object))}
    with pytest.raises(ValueError, match="cannot hold array 'texts'"):
        array_files.write(str(tmp_path), 0, 1, texts)
