"""Dumps of SOK 1.x: files of keys and of rows, written here with NumPy as SOK wrote them."""

import resource

import numpy as np
import pytest

from sok_like import sok2
from sok_like.saving.format import durable

KEYS = np.array([7, 2, 2**40 + 1, 12, 5])
ROWS = np.arange(20, dtype=np.float32).reshape(5, 4)


def write(folder, name, keys=KEYS, rows=ROWS, dtype="<i8"):
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{name}_keys.file").write_bytes(np.asarray(keys).astype(dtype).tobytes())
    (folder / f"{name}_values.file").write_bytes(rows.astype("<f4").tobytes())
    return folder


def films(sok, dim=4, **options):
    """A table of which nothing is to stay."""
    table = sok.EmbeddingVariable(dim, name="films", **options)
    sok.assign(table, [99], np.ones([1, dim]))
    return table


def check_restored(sok, table, path, keys=KEYS, rows=ROWS):
    assert sok.Saver().restore_from_file(table, str(path)).numpy() == b"OK"
    found = [tensor.numpy() for tensor in sok.export(table)]
    np.testing.assert_array_equal(found[0], np.sort(keys))
    np.testing.assert_array_equal(found[1], rows[np.argsort(keys)])


@pytest.mark.parametrize("name", ["films", "EmbeddingVariable", "EmbeddingVariable_3"])
@pytest.mark.parametrize("size", [0, 5])
def test_a_folder_with_the_table_or_the_only_one_that_sok_named(sok, tmp_path, name, size):
    content = KEYS[:size], ROWS[:size]
    check_restored(sok, films(sok), write(tmp_path, name, *content), *content)


def test_the_path_of_the_keys(sok, tmp_path):
    table = films(sok)
    write(tmp_path / "of_another_table", "people")
    for number, name in enumerate(("EmbeddingVariable", "EmbeddingVariable_1")):
        write(tmp_path, name, rows=ROWS + 100 * number)
    for folder, file in ((tmp_path, "Variable_1"), (tmp_path / "of_another_table", "people")):
        with pytest.raises(Exception, match=f"The dump of SOK 1.x.*'films'.*{file}_keys.file"):
            sok.Saver().restore_from_file(table, str(folder))
    check_restored(sok, table, tmp_path / "EmbeddingVariable_1_keys.file", rows=100 + ROWS)


def test_keys_of_32_bits(sok, tmp_path):
    keys = np.array([7, 2**32 - 1, 3, 9, 4])
    path = write(tmp_path, "films", keys, dtype="<u4")
    check_restored(sok, films(sok, key_dtype="uint32"), path, keys)


@pytest.mark.parametrize("name", ["a/b", "nul\0inside", "n" * 300])
def test_names_that_are_none_of_a_file(sok, tmp_path, name):
    try:
        table = sok.EmbeddingVariable(4, name=name)
    except ValueError as error:  # from 2.23 on, TensorFlow refuses a NUL in a name
        pytest.skip(str(error))
    sok.assign(table, KEYS, ROWS)
    sok.Saver().dump_to_file(table, str(tmp_path))
    (keys_file,) = tmp_path.glob("*_keys.file")
    for other in [*tmp_path.glob("*.json"), *tmp_path.glob("*.npz")]:
        other.unlink()
    check_restored(sok, sok.EmbeddingVariable(4, name=name), tmp_path)
    assert keys_file.parent == tmp_path


@pytest.mark.parametrize(
    "change, match",
    [
        ({"dim": 2}, "rows of 2 floats.*Received: 40 and 80 bytes"),  # as 10 keys of 32 bits?
        ({"dim": 8}, "rows of 8 floats.*Received: 40 and 80 bytes"),
        ({"key_dtype": "uint32"}, "keys of uint32 and rows of 4 floats"),
        ({"keys": KEYS[[0, 1, 2, 3, 0]]}, "must hold each key once"),
        ({"rows": None}, "films_values.file, which is missing"),
    ],
)
def test_files_that_do_not_fit_the_table(sok, tmp_path, change, match):
    table = films(sok, **{k: v for k, v in change.items() if k in ("dim", "key_dtype")})
    write(tmp_path, "films", change.get("keys", KEYS))
    if "rows" in change:
        (tmp_path / "films_values.file").unlink()
    with pytest.raises(Exception, match=match):
        sok.Saver().restore_from_file(table, str(tmp_path))
    assert sok.export(table)[0].numpy().tolist() == [99]


@pytest.mark.parametrize("scheme", ["file", "ram"])
def test_paths_with_a_scheme(sok, tmp_path, scheme):
    """The files that a dump leaves for programs of SOK, and back without the dump."""
    folder = f"{scheme}://{tmp_path}"
    table = sok.EmbeddingVariable(4, name="films", key_dtype="int64")
    sok.assign(table, KEYS, ROWS)
    sok.Saver().dump_to_file(table, folder)
    files = {name: durable.read(f"{folder}/{name}") for name in durable.names(folder)}
    assert files["films_values.file"] == ROWS[np.argsort(KEYS)].tobytes()
    for name in files.keys() - {"films_keys.file", "films_values.file"}:
        durable.remove(f"{folder}/{name}")
    check_restored(sok, films(sok), folder)


def test_a_dump_without_its_manifest_is_not_taken_for_one_of_sok(sok, tmp_path):
    table = sok.EmbeddingVariable(2, name="copied")
    sok.assign(table, [1, 2], np.ones([2, 2]))
    sok.Saver().dump_to_file(table, tmp_path)
    other = sok.EmbeddingVariable(2, name="other")
    with pytest.raises(Exception, match=r"'other' is required.*dumps of \['copied'\]"):
        sok.Saver().restore_from_file(other, tmp_path)
    (tmp_path / "copied.json").unlink()
    with pytest.raises(Exception, match="shards of the table without their manifest"):
        sok.Saver().restore_from_file(table, tmp_path)
    for shard in tmp_path.glob("*.npz"):
        shard.unlink()
    table.clear()
    sok.Saver().restore_from_file(table, tmp_path)  # what SOK 1.x would have written
    assert int(table.size()) == 2


def test_what_killed_processes_left_goes_with_the_next_dump(sok, tmp_path):
    left = [tmp_path / f"films_{kind}.{'0' * 16}.tmp" for kind in ("keys", "values")]
    others = [tmp_path / name for name in (f"films_2_keys.{'0' * 16}.tmp", "films_keys.mine.tmp")]
    for path in left + others:
        path.write_bytes(b"half")
    table = sok.EmbeddingVariable(2, name="films")
    sok.Saver().dump_to_file(table, tmp_path)
    assert not any(path.exists() for path in left) and all(path.exists() for path in others)
    assert (tmp_path / "films_keys.file").exists()


@pytest.mark.parametrize("door", ["sok1", "sok2"])
def test_a_full_disk_names_table_and_file_and_leaves_no_keys(sok, tmp_path, monkeypatch, door):
    table = sok2.DynamicVariable(4, name="films")
    sok.assign(table, range(4000), np.ones([4000, 4], np.float32))
    own, (soft, hard) = durable.write_all, resource.getrlimit(resource.RLIMIT_FSIZE)

    def write(*arguments):  # as if the disk took 40 kB
        resource.setrlimit(resource.RLIMIT_FSIZE, (40_000, hard))
        try:
            own(*arguments)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))

    monkeypatch.setattr(durable, "write_all", write)
    error = OSError if door == "sok2" else RuntimeError
    with pytest.raises(error, match=r"File too large \(dump of table 'films.*'\): '.*films"):
        if door == "sok1":
            sok.Saver().dump_to_file(table, tmp_path)
        else:
            sok2.dump(tmp_path, table)
    left = sorted(path.suffix for path in tmp_path.iterdir())
    assert left == ([".json", ".npz"] if door == "sok1" else [])
