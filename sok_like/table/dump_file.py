"""Files of a dump: a table on disk, whole at every instant, for any number of ranks.

    FOLDER/<table>.json                     manifest: format, version, table, list of shard files
    FOLDER/<table>.<dump id>.0-of-2.npz     keys of rank 0 of 2, their rows and slot rows
    FOLDER/<table>.<dump id>.1-of-2.npz

A shard is an uncompressed `.npz`: NumPy reads it without this package, and zip keeps a CRC-32 of
every array, checked when it is read. Its arrays are `keys` int64 `[size]`, `rows` float32
`[size, dim]`, `slot_rows` float32 `[size, sum of slot widths]`, `slot_names`, `slot_widths`; of a
table with policies also `records` int64 `[size, 3]` (frequency, last step, custom score), `waiting`
int64 `[num_waiting, 3]` (key, count, last step), `counters` int64 of a Bloom filter, and `step`.
Dumps without these load as well: nothing is known of their keys then.

Every file is written aside and renamed. The manifest comes last and names the dump's own shard
files, so a reader sees the dump before or the dump after, never half of one; shard files of
earlier dumps are removed behind it.
"""

from __future__ import annotations

import dataclasses
import functools
import glob
import json
import os
import pathlib
import urllib.parse
import zipfile
from collections.abc import Sequence

import numpy as np

FORMAT = "sok_like table"
VERSION = 1


def _no_waiting():
    return np.zeros([0, 3], np.int64)


def _no_counters():
    return np.zeros([0], np.int64)


@dataclasses.dataclass
class Shard:
    """Keys, rows and slot rows of one instant, and what policies know of them."""

    keys: np.ndarray  # int64 [size]
    rows: np.ndarray  # float32 [size, dim]
    slot_rows: np.ndarray  # float32 [size, sum(slot_widths)]
    slot_names: list[str]
    slot_widths: list[int]
    records: np.ndarray | None = None  # int64 [size, 3], None where there are none
    waiting: np.ndarray = dataclasses.field(default_factory=_no_waiting)  # int64 [num_waiting, 3]
    counters: np.ndarray = dataclasses.field(default_factory=_no_counters)  # int64 [num_counters]
    step: int = -1  # -1: not known


def shard_name(table: str, dump_id: str, rank: int, world_size: int) -> str:
    """File name of one rank's part of a dump."""
    return f"{_file_stem(table)}.{dump_id}.{rank}-of-{world_size}.npz"


def write_shard(folder: str, name: str, shard: Shard) -> None:
    """Writes one rank's part, aside and renamed.

    Raises:
        OSError: the folder cannot be written.
    """
    path = pathlib.Path(folder)
    path.mkdir(parents=True, exist_ok=True)
    aside = path / f"{name}.tmp"
    policy = {}
    if shard.step >= 0:
        policy = {"waiting": shard.waiting, "counters": shard.counters, "step": shard.step}
    if shard.records is not None:
        policy["records"] = shard.records
    try:
        with open(aside, "wb") as file:
            np.savez(
                file,
                keys=shard.keys,
                rows=shard.rows,
                slot_rows=shard.slot_rows,
                slot_names=np.asarray(shard.slot_names, dtype=np.str_),
                slot_widths=np.asarray(shard.slot_widths, dtype=np.int64),
                **policy,
            )
            file.flush()
            os.fsync(file.fileno())
        os.replace(aside, path / name)
    finally:
        aside.unlink(missing_ok=True)


def write_manifest(
    folder: str, table: str, dim: int, key_dtype: str, shards: Sequence[str]
) -> None:
    """Makes a complete set of shards the table's dump, and removes the dump before it."""
    path = pathlib.Path(folder)
    manifest = {
        "format": FORMAT,
        "version": VERSION,
        "table": table,
        "dim": dim,
        "key_dtype": key_dtype,
        "shards": list(shards),
    }
    target = path / f"{_file_stem(table)}.json"
    aside = target.with_suffix(".json.tmp")
    aside.write_text(json.dumps(manifest, indent=1) + "\n")
    os.replace(aside, target)
    for old in path.glob(f"{glob.escape(_file_stem(table))}.*-of-*.npz"):
        if old.name not in shards:
            old.unlink(missing_ok=True)


def read_manifest(folder: str, table: str, dim: int) -> list[pathlib.Path]:
    """The shard files of a table's dump.

    Raises:
        FileNotFoundError: there is no dump of the table, or one of its files is missing.
        ValueError: the manifest is none of this package's, of a later version, or of another row
            width.
    """
    path = pathlib.Path(folder) / f"{_file_stem(table)}.json"
    if not path.exists():
        known = sorted(p.stem for p in pathlib.Path(folder).glob("*.json"))
        raise FileNotFoundError(
            f"A dump of table '{table}' is required at {path}. Received: a folder with dumps of "
            f"{known or 'no table'}"
        )
    try:
        manifest = json.loads(path.read_text())
    except ValueError as error:
        raise ValueError(f"{path} must be a manifest in JSON. Received: {error}") from error
    if not isinstance(manifest, dict) or manifest.get("format") != FORMAT:
        raise ValueError(f"{path} must be the manifest of a '{FORMAT}' dump")
    if not isinstance(manifest.get("version"), int) or manifest["version"] > VERSION:
        raise ValueError(
            f"{path} must be of version {VERSION} or earlier. "
            f"Received: version {manifest.get('version')!r}; it needs a later sok_like"
        )
    if manifest["dim"] != dim:
        raise ValueError(
            f"Table '{table}' has rows of {dim} floats. Received: a dump with rows of "
            f"{manifest['dim']} in {path}"
        )
    files = [path.parent / name for name in manifest["shards"]]
    for file in files:
        if not file.exists():
            raise FileNotFoundError(f"The dump {path} needs {file}, which is missing")
    return files


def read_shard(path: pathlib.Path, dim: int) -> Shard:
    """Reads one file and checks it.

    Raises:
        ValueError: damaged (a wrong CRC-32, a cut file) or of wrong shapes.
    """
    try:
        with np.load(path, allow_pickle=False) as arrays:
            shard = Shard(
                keys=arrays["keys"],
                rows=arrays["rows"],
                slot_rows=arrays["slot_rows"],
                slot_names=[str(name) for name in arrays["slot_names"]],
                slot_widths=[int(width) for width in arrays["slot_widths"]],
                records=arrays["records"] if "records" in arrays else None,
            )
            if "step" in arrays:
                shard.waiting, shard.counters = arrays["waiting"], arrays["counters"]
                shard.step = int(arrays["step"])
    except (zipfile.BadZipFile, EOFError, KeyError, OSError, ValueError) as error:
        raise ValueError(f"{path} must be a whole shard file. Received: {error}") from error
    size = len(shard.keys)
    shapes = shard.keys.shape, shard.rows.shape, shard.slot_rows.shape
    if shapes != ((size,), (size, dim), (size, sum(shard.slot_widths))):
        raise ValueError(
            f"{path} must hold keys [size], rows [size, {dim}] and slot rows "
            f"[size, {sum(shard.slot_widths)}]. Received: {shapes}"
        )
    records = (size, 3) if shard.records is None else shard.records.shape
    if (records, shard.waiting.shape[1:], shard.counters.ndim) != ((size, 3), (3,), 1):
        raise ValueError(
            f"{path} must hold records [size, 3], waiting keys [num_waiting, 3] and counters "
            f"[num_counters]. Received: {records}, {shard.waiting.shape}, {shard.counters.shape}"
        )
    return shard


def owned_by(shards: Sequence[Shard], rank: int, world_size: int, dim: int) -> Shard:
    """What `rank` of `world_size` owns: keys with `uint64(key) % world_size == rank`.

    Counters of Bloom filters cannot be taken apart by key: the largest of all shards' are right for
    every key, if a little too large.

    Raises:
        ValueError: shards of one dump name different slot variables, or have filters of different
            sizes.
    """
    filled = [shard for shard in shards if len(shard.keys)]
    found = _joined(filled, rank, world_size) if filled else _empty(dim)
    found.step = max((shard.step for shard in shards), default=-1)
    waiting = [shard.waiting for shard in shards]
    if waiting:
        joined = np.concatenate(waiting)
        found.waiting = joined[_is_mine(joined[:, 0], rank, world_size)]
    counters = [shard.counters for shard in shards if len(shard.counters)]
    if len({len(c) for c in counters}) > 1:
        raise ValueError(
            "All shards of a dump must have filters of one size. Received: "
            f"{sorted({len(c) for c in counters})} counters"
        )
    if counters:
        found.counters = functools.reduce(np.maximum, counters)
    return found


def _joined(shards, rank, world_size):
    first = shards[0]
    parts = []
    has_records = all(shard.records is not None for shard in shards)
    for shard in shards:
        if (shard.slot_names, shard.slot_widths) != (first.slot_names, first.slot_widths):
            raise ValueError(
                "All shards of a dump must have the same slot variables. Received: "
                f"{first.slot_names} and {shard.slot_names}"
            )
        mine = _is_mine(shard.keys, rank, world_size)
        records = shard.records if has_records else np.zeros([len(shard.keys), 3], np.int64)
        parts.append((shard.keys[mine], shard.rows[mine], shard.slot_rows[mine], records[mine]))
    keys, rows, slot_rows, records = (np.concatenate(part) for part in zip(*parts, strict=True))
    return Shard(
        *(keys, rows, slot_rows, first.slot_names, first.slot_widths),
        records=records if has_records else None,
    )


def _is_mine(keys, rank, world_size):
    return np.ascontiguousarray(keys).view(np.uint64) % np.uint64(world_size) == rank


def _empty(dim):
    rows, slot_rows = np.zeros([0, dim], np.float32), np.zeros([0, 0], np.float32)
    return Shard(np.zeros([0], np.int64), rows, slot_rows, [], [])


def _file_stem(table):
    # Any table name is a file name, and has no dot in it: "a" must not claim files of "a.b".
    return urllib.parse.quote(table, safe="").replace(".", "%2E") or "_"
