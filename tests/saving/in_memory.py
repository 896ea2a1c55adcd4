"""What is in files of dumps, in memory at once; the package reads them part by part."""

import dataclasses

import numpy as np

from sok_like.saving.format import deltas, manifest, shard_file
from sok_like.saving.format.shard_file import ShardSource
from sok_like.table.content import BY_KEY, TableShard


class ShardInMemory(ShardSource):
    """A shard in memory."""

    def __init__(self, shard: TableShard):
        self.name, self._shard, self.num_keys = "a shard", shard, len(shard.keys)
        self.slot_names, self.slot_widths = shard.slot_names, shard.slot_widths
        self.key_bytes = sum(array[:1].nbytes for array in shard.by_key().values())

    def keys(self, begin, end):
        return np.asarray(self._shard.keys[begin:end])

    def part(self, begin, end):
        arrays = {name: np.array(a[begin:end]) for name, a in self._shard.by_key().items()}
        return TableShard(slot_names=self.slot_names, slot_widths=self.slot_widths, **arrays)

    def without_keys(self):
        nothing = {name: a[:0] for name, a in self._shard.by_key().items()}
        return dataclasses.replace(self._shard, **nothing)


def whole(content):
    """All parts of a `deltas.MergedDump` together, as a TableShard."""
    found, begin = dataclasses.replace(content.rest), 0
    for name in BY_KEY:
        array = getattr(found, name)
        if array is not None:
            setattr(found, name, np.zeros([content.num_keys, *array.shape[1:]], array.dtype))
    for part in content.parts():
        end = begin + len(part.keys)
        found.keys[begin:end], found.rows[begin:end] = part.keys, part.rows
        found.slot_rows[begin:end] = part.slot_rows
        if found.records is not None:
            found.records[begin:end] = part.records
        begin = end
    return found


def whole_file(file):
    """All of a `ShardFile`, as a TableShard."""
    by_key, rest = file.part(0, file.num_keys), file.without_keys()
    return dataclasses.replace(rest, **{name: getattr(by_key, name) for name in BY_KEY})


def write_shards(folder, shards, table, dump_id):
    """Shard files of all ranks, as a manifest lists them."""
    names = [manifest.shard_name(table, dump_id, r, len(shards)) for r in range(len(shards))]
    return [shard_file.write_shard(folder, *pair) for pair in zip(names, shards, strict=True)]


def write_dump(folder, shards, table, dim, dump_id, *rest):
    entries = write_shards(folder, shards, table, dump_id)
    manifest.write_manifest(folder, manifest.Head(table, dim, "int64", dump_id), entries, *rest)


def read_dump(folder, table, dim, rank=0, world_size=1):
    return deltas.content_of(manifest.read_manifest(folder, table, dim), rank, world_size, dim)
