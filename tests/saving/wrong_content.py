"""Dumps that hold what no table can have, with right checksums: each must be refused."""

import io
import itertools
import json

import numpy as np

from sok_like.saving.format import checksums


def signed(manifest):
    """The text of a manifest with a right SHA-256."""
    manifest["sha256"] = checksums.of_fields(manifest)
    return json.dumps(manifest, indent=1) + "\n"


def change_manifest(folder, change):
    """Calls `change` with the fields of a folder's only manifest, and signs what they are then."""
    (path,) = folder.glob("*.json")
    manifest = json.loads(path.read_text())
    change(manifest)
    path.write_text(signed(manifest))


def _key_twice(arrays, draw):
    at = draw.randrange(1, len(arrays["keys"]))
    arrays["keys"][at] = arrays["keys"][at - draw.choice([0, 1]) - 1]


def _key_of_another_rank(arrays, draw):  # which may be in the other shard, too
    arrays["keys"][draw.randrange(len(arrays["keys"]))] += 1


def _keys_in_another_order(arrays, draw):
    arrays["keys"][:2] = arrays["keys"][1::-1]


def _negative_number(arrays, draw):
    known = {"optimizer_step", "initial_row_scale", "step", "counters"} & arrays.keys()
    name = draw.choice(sorted(known))
    arrays[name] = arrays[name] * 0 - draw.choice([2, 2**40])


def _negative_column(arrays, draw):
    name = draw.choice(["records", "waiting"])  # waiting keys begin with the key
    arrays[name][3, draw.choice([0, 1]) + (name == "waiting")] = -draw.choice([2, 9])


def _waiting_key_twice(arrays, draw):
    arrays["waiting"][5, 0] = arrays["waiting"][7, 0]


def _erased_key_twice(arrays, draw):
    arrays["erased"][2] = arrays["erased"][1]


def _no_number(arrays, draw):
    name = draw.choice(sorted({"steps", "initial_row_scale"} & arrays.keys()))
    wrong = draw.choice([np.nan, np.inf, -np.inf])
    if name == "steps":
        arrays[name][draw.randrange(3), draw.randrange(3)] = wrong
    else:
        arrays[name] = np.asarray(wrong)


def _wrong_count(arrays, draw):
    arrays["steps"][0, 0] = draw.choice([-1, 0.5, 2.0**31, 1e300])
    arrays["steps"][2, 2] = draw.choice([0, -4, 11])


def _slot_name_twice(arrays, draw):
    arrays["slot_names"] = np.asarray([draw.choice(["momentum", "velocity"])] * 2)


# Each with the array that it needs.
_OF_CONTENT = {
    **dict.fromkeys((_key_twice, _keys_in_another_order, _slot_name_twice), "keys"),
    **{_key_of_another_rank: "keys", _negative_number: "optimizer_step"},
    **dict.fromkeys((_negative_column, _waiting_key_twice), "records"),
    **dict.fromkeys((_erased_key_twice, _wrong_count), "erased"),
    _no_number: "initial_row_scale",
}


def in_shard(files, draw):
    path = draw.choice([file for file in files if file.suffix == ".npz"])
    with np.load(path) as members:
        arrays = dict(members)
    known = [
        change
        for change, needed in _OF_CONTENT.items()
        if needed in arrays and (change is not _key_of_another_rank or "-of-1." not in path.name)
    ]
    change = draw.choice(known)
    change(arrays, draw)
    buffer = io.BytesIO()
    np.savez(buffer, **arrays)
    return resigned(files, path, buffer.getvalue()), f"content {change.__name__.strip('_')}"


def resigned(files, path, data):
    """The bytes of a shard and of the manifest that lists it with right checksums."""
    (named,) = (file for file in files if file.suffix == ".json")
    manifest, checksum = json.loads(named.read_text()), checksums.RunningChecksum()
    checksum.add(0, memoryview(data))
    lists = [manifest["shards"], *(delta["shards"] for delta in manifest["deltas"] or ())]
    for entry in itertools.chain.from_iterable(lists):
        if entry["file"] == path.name:
            entry |= {"checksum": checksum.checksum(len(data)), "bytes": len(data)}
    return {path: data, named: signed(manifest).encode()}


def in_manifest(files, draw):
    (path,) = (file for file in files if file.suffix == ".json")
    manifest = json.loads(path.read_text())
    lists = [manifest["shards"], *(delta["shards"] for delta in manifest["deltas"] or ())]
    shards = draw.choice(lists)
    kind = draw.choice(["many", "dim", "keys", "bytes", "step"])
    if kind == "many":
        shards += [shards[0]] * 200
    elif kind == "dim":
        manifest["dim"] = draw.choice([0, -1, 3, 5, 4.5, "4", None])
    elif kind == "step":
        manifest["step"] = draw.choice([-2, 1.5, "7", None, True])
    else:
        draw.choice(shards)[kind] = draw.choice([-1, 0, 599, 2**40, 1.0, None])
    return {path: signed(manifest).encode()}, f"content of manifest: {kind}"
