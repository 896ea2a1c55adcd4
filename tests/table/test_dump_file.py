"""Dump files: whole or refused, for any number of ranks."""

import json

import numpy as np
import pytest

from sok_like.table import dump_file


def shard(keys, dim=3, seed=0):
    keys = np.asarray(keys, np.int64)
    values = np.random.default_rng(seed).standard_normal((len(keys), 3 * dim)).astype(np.float32)
    return dump_file.Shard(
        keys, values[:, :dim], values[:, dim:], ["momentum", "velocity"], [dim, dim]
    )


def dump(folder, shards, table="user id/x", dump_id="1", dim=3):
    names = [dump_file.shard_name(table, dump_id, rank, len(shards)) for rank in range(len(shards))]
    for name, part in zip(names, shards, strict=True):
        dump_file.write_shard(folder, name, part)
    dump_file.write_manifest(folder, table, dim, "int64", names)


def test_shard_comes_back_as_written(tmp_path):
    written = shard([-1, 5, 2**63 - 1])
    dump_file.write_shard(tmp_path, "a.npz", written)
    read = dump_file.read_shard(tmp_path / "a.npz", 3)
    np.testing.assert_array_equal(read.keys, written.keys)
    np.testing.assert_array_equal(read.rows, written.rows)
    np.testing.assert_array_equal(read.slot_rows, written.slot_rows)
    assert (read.slot_names, read.slot_widths) == (["momentum", "velocity"], [3, 3])


@pytest.mark.parametrize("world_size", [1, 2, 3, 7])
def test_every_key_has_one_owner(world_size):
    keys = np.asarray([0, 1, -1, -2, 2**62, -(2**63), 17, 18], np.int64)
    parts = [
        dump_file.owned_by([shard(keys[:5]), shard(keys[5:])], rank, world_size, 3)
        for rank in range(world_size)
    ]
    assert sorted(k for part in parts for k in part.keys) == sorted(keys)
    for rank, part in enumerate(parts):
        assert all(int(key) % 2**64 % world_size == rank for key in part.keys)


def test_a_table_without_keys(tmp_path):
    dump(tmp_path, [shard([])])
    files = dump_file.read_manifest(tmp_path, "user id/x", 3)
    part = dump_file.owned_by([dump_file.read_shard(f, 3) for f in files], 0, 1, 3)
    assert part.keys.shape == (0,) and part.rows.shape == (0, 3)


def test_the_later_dump_replaces_the_earlier(tmp_path):
    dump(tmp_path, [shard([1]), shard([2])], dump_id="1")
    dump(tmp_path, [shard([3])], dump_id="2")
    (file,) = dump_file.read_manifest(tmp_path, "user id/x", 3)
    assert dump_file.read_shard(file, 3).keys.tolist() == [3]
    assert len(list(tmp_path.glob("*.npz"))) == 1


def test_a_dump_cut_short_leaves_the_earlier_one(tmp_path):
    dump(tmp_path, [shard([1])], dump_id="1")
    # Everything that a second dump does before it writes its manifest.
    dump_file.write_shard(tmp_path, dump_file.shard_name("user id/x", "2", 0, 1), shard([2]))
    (file,) = dump_file.read_manifest(tmp_path, "user id/x", 3)
    assert dump_file.read_shard(file, 3).keys.tolist() == [1]


def test_tables_of_similar_names_do_not_touch_each_other(tmp_path):
    dump(tmp_path, [shard([1])], table="a")
    dump(tmp_path, [shard([2])], table="a.b")
    dump(tmp_path, [shard([3])], table="a", dump_id="2")
    (file,) = dump_file.read_manifest(tmp_path, "a.b", 3)
    assert dump_file.read_shard(file, 3).keys.tolist() == [2]


@pytest.mark.parametrize("damage", ["flip", "cut", "empty"])
def test_a_damaged_file_is_refused(tmp_path, damage):
    dump_file.write_shard(tmp_path, "a.npz", shard(range(50)))
    data = bytearray((tmp_path / "a.npz").read_bytes())
    if damage == "flip":
        at = data.index(np.float32(shard(range(50)).rows[20, 1]).tobytes())
        data[at] ^= 1
    else:
        data = data[: len(data) // 2] if damage == "cut" else b""
    (tmp_path / "a.npz").write_bytes(data)
    with pytest.raises(ValueError, match=r"a\.npz must be a whole shard file"):
        dump_file.read_shard(tmp_path / "a.npz", 3)


def test_no_dump_of_the_table(tmp_path):
    dump(tmp_path, [shard([1])], table="other")
    with pytest.raises(FileNotFoundError, match=r"table 'mine' is required.*\['other'\]"):
        dump_file.read_manifest(tmp_path, "mine", 3)


def test_another_row_width(tmp_path):
    dump(tmp_path, [shard([1])])
    with pytest.raises(ValueError, match="rows of 4 floats. Received: a dump with rows of 3"):
        dump_file.read_manifest(tmp_path, "user id/x", 4)


def test_a_missing_shard(tmp_path):
    dump(tmp_path, [shard([1]), shard([2])])
    next(tmp_path.glob("*.1-of-2.npz")).unlink()
    with pytest.raises(FileNotFoundError, match="1-of-2.npz, which is missing"):
        dump_file.read_manifest(tmp_path, "user id/x", 3)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"version": 99}, "must be of version 1 or earlier. Received: version 99"),
        ({"format": "else"}, "must be the manifest of"),
    ],
)
def test_a_manifest_of_something_else(tmp_path, change, message):
    dump(tmp_path, [shard([1])])
    (path,) = tmp_path.glob("*.json")
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
    with pytest.raises(ValueError, match=message):
        dump_file.read_manifest(tmp_path, "user id/x", 3)


def test_slot_variables_must_agree():
    other = shard([2])
    other.slot_names = ["accumulator", "linear"]
    with pytest.raises(ValueError, match="same slot variables"):
        dump_file.owned_by([shard([1]), other], 0, 1, 3)
