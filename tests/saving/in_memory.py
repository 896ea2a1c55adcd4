"""What is in files of dumps, in memory at once; the package reads them part by part."""

import dataclasses

import numpy as np

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


def whole_file(file):
    """All of a `ShardFile`, as a TableShard."""
    by_key, rest = file.part(0, file.num_keys), file.without_keys()
    return dataclasses.replace(rest, **{name: getattr(by_key, name) for name in BY_KEY})
