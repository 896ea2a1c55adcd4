"""Dump files: whole or refused, for any number of ranks."""

import json
import os
import pathlib

import numpy as np
import pytest

from sok_like.saving.format import manifest as manifest_file
from sok_like.saving.format import shard_file
from sok_like.table.content import TableShard
from tests.saving import fuzz, in_memory, wrong_content
from tests.saving.in_memory import whole


def shard(keys, dim=3, seed=0):
    keys = np.asarray(keys, np.int64)
    values = np.random.default_rng(seed).standard_normal((len(keys), 3 * dim)).astype(np.float32)
    return TableShard(keys, values[:, :dim], values[:, dim:], ["momentum", "velocity"], [dim, dim])


def dump(folder, shards, table="user id/x", dump_id="1", dim=3):
    in_memory.write_dump(folder, shards, table, dim, dump_id)


def read(folder, table="user id/x", dim=3, rank=0, world_size=1):
    return whole(in_memory.read_dump(folder, table, dim, rank, world_size))


@pytest.mark.parametrize("world_size", [1, 2, 3, 7])
def test_every_key_has_one_owner(tmp_path, world_size):
    keys = [0, 1, 17, 18, 2**62, -(2**63), -2, -1]  # they ascend as unsigned numbers
    dump(tmp_path, [shard(keys)])
    parts = [read(tmp_path, rank=rank, world_size=world_size) for rank in range(world_size)]
    assert sorted(k for part in parts for k in part.keys) == sorted(keys)
    for rank, part in enumerate(parts):
        assert all(int(key) % 2**64 % world_size == rank for key in part.keys)


def of_keys(keys, **of_delta):
    """Of a table with policies; rows, slot rows and records are the key itself."""
    columns = np.tile(np.asarray(keys, np.int64)[:, np.newaxis], [1, 3])
    rows = columns.astype(np.float32)
    of_table = {"records": columns, "step": 4}
    return TableShard(columns[:, 0].copy(), rows, rows, ["momentum"], [3], **of_table, **of_delta)


def test_a_merged_dump_can_be_read_though_a_rank_owns_no_key(tmp_path):
    """All keys of a base and a delta by 2 ranks are even: rank 1 has none."""
    of_delta = {"erased": np.zeros([0], np.int64), "steps": np.zeros([0, 3])}
    delta = [of_keys([4, 8], **of_delta), of_keys([], **of_delta)]
    entries = in_memory.write_shards(tmp_path, delta, "user id/x", "de1a")
    chain = [{"dump": "de1a", "since": "ba5e", "step": 4, "shards": entries}]
    base = [of_keys([2, 4, 6]), of_keys([])]
    in_memory.write_dump(tmp_path, base, "user id/x", 3, "ba5e", 4, chain)
    merged = [in_memory.read_dump(tmp_path, "user id/x", 3, rank, 2) for rank in (0, 1)]
    assert [content.num_keys for content in merged] == [4, 0]
    assert merged[1].rest.slot_names == ["momentum"] and merged[1].rest.records.shape == (0, 3)
    dump(tmp_path, [content.sorted() for content in merged], dump_id="fe11")
    for world_size in (1, 2, 3):
        parts = [read(tmp_path, rank=rank, world_size=world_size) for rank in range(world_size)]
        keys = np.concatenate([part.keys for part in parts])
        assert sorted(keys) == [2, 4, 6, 8]
        for name in ("rows", "slot_rows", "records"):
            values = np.concatenate([getattr(part, name) for part in parts])
            assert (values == keys[:, np.newaxis]).all() and values.shape == (4, 3)


def test_a_shard_without_one_of_its_arrays_is_refused(tmp_path, monkeypatch):
    with monkeypatch.context() as patched:
        patched.delitem(shard_file._MEMBERS, "waiting")
        dump(tmp_path, [of_keys([2])])
    with pytest.raises(ValueError, match=r"no arrays \['waiting'\]"):
        read(tmp_path)


def test_a_dump_cut_short_leaves_the_earlier_one_and_the_next_one_clears_up(tmp_path):
    dump(tmp_path, [shard([1])], dump_id="1")
    name = manifest_file.shard_name("user id/x", "2", 0, 1)
    # All that a second dump does before it has its manifest, and what a killed one leaves.
    shard_file.write_shard(tmp_path, name, shard([2]))
    (tmp_path / f"{name}.tmp").write_bytes(b"half")
    (tmp_path / "user%20id%2Fx.json.tmp").write_bytes(b"{")
    others = ["user%20id%2Fx.backup.npz", "user%20id%2Fxy.2.0-of-1.npz", "else.npz.tmp"]
    for other in others:
        (tmp_path / other).write_bytes(b"not ours")
    assert read(tmp_path).keys.tolist() == [1]
    dump(tmp_path, [shard([3])], dump_id="3")
    manifest, part = "user%20id%2Fx.json", manifest_file.shard_name("user id/x", "3", 0, 1)
    assert {path.name for path in tmp_path.iterdir()} == {manifest, part, *others}


def test_everything_is_on_the_disk_before_it_is_named_and_before_the_old_dump_goes(
    tmp_path, monkeypatch
):
    """A loss of power at any instant leaves the dump before it or the new one."""
    dump(tmp_path, [shard([1])], dump_id="1")
    done = []
    fsync, replace, unlink = os.fsync, os.replace, os.unlink

    def note_fsync(number):
        done.append(("sync", pathlib.Path(f"/proc/self/fd/{number}").resolve().name))
        fsync(number)

    def note_replace(aside, target):
        done.append(("name", pathlib.Path(target).name))
        assert done[-2] == ("sync", pathlib.Path(aside).name)
        replace(aside, target)

    def note_unlink(path):
        unlink(path)
        done.append(("remove", pathlib.Path(path).name))

    monkeypatch.setattr(os, "fsync", note_fsync)
    monkeypatch.setattr(os, "replace", note_replace)
    monkeypatch.setattr(os, "unlink", note_unlink)
    dump(tmp_path, [shard([2])], dump_id="2")
    stem, folder = "user%20id%2Fx", ("sync", tmp_path.name)
    assert [what for what in done if what[0] != "sync" or what == folder] == [
        ("name", f"{stem}.2.0-of-1.npz"),
        folder,
        ("name", f"{stem}.json"),
        folder,
        ("remove", f"{stem}.1.0-of-1.npz"),
    ]


@pytest.mark.parametrize("table", ["../up", "nul\0inside", "/etc/x", "n" * 300, "é" * 300, "."])
@pytest.mark.parametrize("end", ["'", ".b"])
def test_any_name_is_a_file_in_the_folder(tmp_path, table, end):
    folder = tmp_path / "dumps"
    dump(folder, [shard([5])], table=table + end)
    for dump_id in "12":  # which removes nothing of the other table
        dump(folder, [shard([4])], table, dump_id)
    assert [read(folder, name).keys.tolist() for name in (table, table + end)] == [[4], [5]]
    assert [path.name for path in tmp_path.iterdir()] == ["dumps"]
    assert len(list(folder.iterdir())) == 4


@pytest.mark.parametrize("edit", ["none", "one of two", "twice"])
def test_a_part_of_a_dump_is_not_loaded(tmp_path, edit):
    fuzz.write_dump(tmp_path, [fuzz.make_shard(rank, 2, True) for rank in (0, 1)])
    chosen = {"none": [], "one of two": [0], "twice": [0, 0]}[edit]
    wrong_content.change_manifest(
        tmp_path, lambda fields: fields.update(shards=[fields["shards"][at] for at in chosen])
    )
    with pytest.raises(ValueError, match="one shard file per rank"):
        fuzz.read_dump(tmp_path)


@pytest.mark.parametrize("with_deltas", [False, True])
@pytest.mark.parametrize("with_policy", [False, True])
def test_fuzzed_dumps_are_refused_or_right(with_deltas, with_policy):
    counts, wrong = fuzz.run(50, 99, with_deltas, with_policy)
    assert not wrong
    assert sum(counts.values()) == 50 and len(counts) > 8


REFUSED = {
    "no dump": (lambda folder: read(folder, "mine"), "table 'mine' is required.*'user%20id%2Fx'"),
    "another width": (
        lambda folder: read(folder, dim=4),
        "rows of 4 floats. Received: a dump with rows of 3",
    ),
    "another table": (
        lambda folder: (only(folder, "*.json").rename(folder / "mine.json"), read(folder, "mine")),
        "manifest of table 'mine'. Received: 'user id/x'",
    ),
    "a missing shard": (
        lambda folder: (only(folder, "*.1-of-2.npz").unlink(), read(folder)),
        "1-of-2.npz, which is missing",
    ),
    "version": (
        lambda folder: edited(folder, version=3),
        r"x\.json must be of version 4. Received: version 3; dump again, or use the",
    ),
    "format": (lambda folder: edited(folder, format="else"), "must be the manifest of"),
    "checksum": (
        lambda folder: edited(folder, dim=4),
        "whole manifest. Received: fields whose SHA-256 differs",
    ),
}


def only(folder, pattern):
    (path,) = folder.glob(pattern)
    return path


def edited(folder, **change):
    path = only(folder, "*.json")
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
    read(folder)


@pytest.mark.parametrize("what", REFUSED)
def test_what_is_no_dump_of_the_table(tmp_path, what):
    dump(tmp_path, [shard([1]), shard([2])])
    call, message = REFUSED[what]
    with pytest.raises((ValueError, FileNotFoundError), match=message):
        call(tmp_path)


def test_slot_variables_must_agree(tmp_path):
    other = shard([1])
    other.slot_names = ["accumulator", "linear"]
    dump(tmp_path, [shard([2]), other])
    with pytest.raises(ValueError, match="same slot variables"):
        read(tmp_path)


def test_a_dump_whose_files_another_dump_removed_does_not_replace_it(tmp_path):
    name = manifest_file.shard_name("user id/x", "1", 0, 1)
    entry = shard_file.write_shard(tmp_path, name, shard([1]))
    dump(tmp_path, [shard([2])], dump_id="2")  # of another thread, between the two calls
    head = manifest_file.Head("user id/x", 3, "int64", "1")
    with pytest.raises(FileNotFoundError, match=r"1\.0-of-1\.npz.* is missing"):
        manifest_file.write_manifest(tmp_path, head, [entry])
    assert read(tmp_path).keys.tolist() == [2]
    manifest_file.remove_unlisted(tmp_path, "user id/x", name.replace(".1.", ".2."))
    assert read(tmp_path).keys.tolist() == [2]
