"""A dump and its deltas as one rank reads them, above all a rank that owns none of the keys."""

import numpy as np
import pytest

from sok_like.saving.format import deltas, manifest, shard_file
from sok_like.table.content import TableShard
from tests.saving.in_memory import whole

DIM = 3


def shard(keys, is_delta=False, slots=("momentum",)):
    """Keys of a table with policies; their rows, slot rows and records are the key itself."""
    keys = np.asarray(keys, np.int64)
    column = keys[:, np.newaxis]
    made = TableShard(
        keys,
        np.broadcast_to(column, [len(keys), DIM]).astype(np.float32),
        np.broadcast_to(column, [len(keys), DIM * len(slots)]).astype(np.float32),
        list(slots),
        [DIM] * len(slots),
        records=np.broadcast_to(column, [len(keys), 3]).copy(),
        step=4,
    )
    if is_delta:
        made.erased, made.steps = np.zeros([0], np.int64), np.zeros([0, 3])
    return made


def write(folder, name, shards):
    names = [manifest.shard_name("t", name, rank, len(shards)) for rank in range(len(shards))]
    pairs = zip(names, shards, strict=True)
    return [shard_file.write_shard(folder, file, each) for file, each in pairs]


def write_manifest(folder, dump_id, *rest):
    manifest.write_manifest(folder, manifest.Head("t", DIM, "int64", dump_id), *rest)


def read(folder, rank=0, world_size=1):
    return deltas.content_of(manifest.read_manifest(folder, "t", DIM), rank, world_size, DIM)


def chain(folder):
    """A base and a delta by 2 ranks, all of whose keys are even: rank 1 has none."""
    base = write(folder, "ba5e", [shard([2, 4, 6]), shard([])])
    delta = write(folder, "de1a", [shard([4, 8], True), shard([], True)])
    following = [{"dump": "de1a", "since": "ba5e", "step": 4, "shards": delta}]
    write_manifest(folder, "ba5e", base, 4, following)


def test_a_merged_dump_can_be_read_though_a_rank_owns_no_key(tmp_path):
    chain(tmp_path)
    merged = [read(tmp_path, rank, 2) for rank in (0, 1)]
    assert [content.num_keys for content in merged] == [4, 0]
    assert merged[1].rest.slot_names == ["momentum"] and merged[1].rest.records.shape == (0, 3)
    entries = write(tmp_path, "fe11", [content.sorted() for content in merged])
    write_manifest(tmp_path, "fe11", entries, 4, [])
    for world_size in (1, 2, 3):
        parts = [whole(read(tmp_path, rank, world_size)) for rank in range(world_size)]
        keys = np.concatenate([part.keys for part in parts])
        assert sorted(keys) == [2, 4, 6, 8]
        for name in ("rows", "slot_rows", "records"):
            values = np.concatenate([getattr(part, name) for part in parts])
            assert (values == keys[:, np.newaxis]).all() and values.shape == (4, 3)


def test_a_shard_without_one_of_its_arrays_is_refused(tmp_path, monkeypatch):
    monkeypatch.delitem(shard_file._MEMBERS, "waiting")
    entries = write(tmp_path, "bad", [shard([2])])
    monkeypatch.undo()
    write_manifest(tmp_path, "bad", entries, 4, [])
    with pytest.raises(ValueError, match=r"no arrays \['waiting'\]"):
        read(tmp_path)
