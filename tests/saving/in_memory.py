"""What is in files of dumps, in memory at once; the package reads them part by part."""

import dataclasses

import numpy as np

from sok_like.saving.format import deltas, manifest, shard_file
from sok_like.table.content import BY_KEY


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


def write_shards(folder, shards, table, dump_id):
    """Shard files of all ranks, as a manifest lists them."""
    names = [manifest.shard_name(table, dump_id, r, len(shards)) for r in range(len(shards))]
    return [shard_file.write_shard(folder, *pair) for pair in zip(names, shards, strict=True)]


def write_dump(folder, shards, table, dim, dump_id, *rest):
    entries = write_shards(folder, shards, table, dump_id)
    manifest.write_manifest(folder, manifest.Head(table, dim, "int64", dump_id), entries, *rest)


def read_dump(folder, table, dim, rank=0, world_size=1):
    return deltas.content_of(manifest.read_manifest(folder, table, dim), rank, world_size, dim)
