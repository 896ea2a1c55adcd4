"""Files of a dump: a table on disk, valid at every instant, for any number of ranks.

    FOLDER/<table>.json                     manifest: the table, and its shard files with checksums
    FOLDER/<table>.<dump id>.0-of-2.npz     keys of rank 0 of 2, their rows and slot rows
    FOLDER/<table>.<dump id>.1-of-2.npz

A manifest may continue with deltas, each with its own shards (`deltas.py`): the changes since the
base, or since the delta before. One manifest names all files in order, so a file that is lost,
exchanged or taken from another dump is detected. It contains a SHA-256 of itself.

The manifest comes last, so a reader sees the old dump or the new one, never a mixture. Then
leftovers of the table's other dumps are removed: the shards of the previous dump, shards that never
had a manifest, and files that a killed process was writing.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import re
import threading
import urllib.parse
from collections.abc import Sequence
from typing import Any, NamedTuple

from sok_like.runtime.checks import wrong_argument
from sok_like.saving.format import checksums, durable
from sok_like.saving.format.progress import Progress
from sok_like.saving.format.shard_file import ShardFile, ShardSource

FORMAT = "sok_like table"
VERSION = 4

_FIELDS = {"format", "version", "table", "dim", "key_dtype", "dump", "shards", "step", "deltas"}
_FIELDS |= {"sha256"}
_DELTA_FIELDS = {"dump": str, "since": str, "step": int, "shards": list}
_SHARD_FIELDS = {"file": str, "bytes": int, "checksum": str, "keys": int}
# Bytes of a manifest at most: for each file in its folder, for a character of the table's name
# (JSON may need two escapes), and for the rest.
_PER_FILE, _PER_CHARACTER, _REST = 2**10, 12, 2**14
_MAX_NAME = 2**16  # characters of a table's name that is not known
_MAX_STEM = 120  # characters: file systems take 255, and the rest of a name needs up to 60
_publishing = threading.Lock()  # a dump removes the files of the others


class Head(NamedTuple):
    """What a manifest says of the table, and the name of the dump."""

    table: str
    dim: int
    key_dtype: str
    dump: str


@dataclasses.dataclass
class Dump:
    """The content of a manifest."""

    files: list[str]
    entries: list[dict[str, Any]]  # one per file
    identity: str  # differs between dumps
    name: str
    step: int = -1  # of the optimizer; -1: unknown
    may_grow: bool = False  # whether deltas may follow
    dim: int = 0  # of the base
    deltas: list[Dump] = dataclasses.field(default_factory=list)  # in order

    def open(self, number: int, dim: int, progress: Progress | None = None) -> ShardSource:
        """Opens one of the shards; raises ValueError as `ShardFile` does."""
        entry, world_size = self.entries[number], len(self.files)
        return ShardFile(self.files[number], dim, entry, progress, (number, world_size))


def shard_name(table: str, dump_id: str, rank: int, world_size: int) -> str:
    """The name of one rank's file of a dump."""
    return f"{file_stem(table)}.{dump_id}.{rank}-of-{world_size}.npz"


def check_seen(folder: str, entries: Sequence[dict[str, Any]]) -> None:
    """Raises unless the folder shows each shard that was written."""
    for rank, entry in enumerate(entries):
        path = durable.join(folder, entry["file"])
        if not durable.exists(path):
            lost = f"{folder!r}, where {entry['file']}, which rank {rank} has written, is missing"
            required = "be on a file system that all ranks share"
            raise durable.wrong("The folder of a dump", required, lost, error=FileNotFoundError)
        if durable.size(path) != entry["bytes"]:
            required = f"have the {entry['bytes']} bytes that rank {rank} has written"
            raise durable.wrong(path, required, durable.size(path))


def write_manifest(
    folder: str,
    head: Head,
    entries: Sequence[dict[str, Any]],
    step: int = -1,
    deltas: Sequence[dict[str, Any]] | None = None,
) -> None:
    """Makes a complete set of shards the table's dump, and removes the previous dump."""
    # After an OSError that is still there, unless the manifest was in its place already.
    manifest = {"format": FORMAT, "version": VERSION, **head._asdict(), "shards": list(entries)}
    manifest |= {"step": step, "deltas": None if deltas is None else list(deltas)}
    manifest["sha256"] = checksums.of_fields(manifest)
    data = (json.dumps(manifest, indent=1) + "\n").encode()
    listed = [entries, *(delta["shards"] for delta in deltas or ())]
    with _publishing:
        for shards in listed:
            check_seen(folder, shards)
        durable.write(_path_of(folder, head.table), data)
        # The dump is complete. Files that cannot be removed now are removed by the next dump.
        with contextlib.suppress(OSError):
            kept = {entry["file"] for shards in listed for entry in shards}
            stem = re.escape(file_stem(head.table))
            ours = re.compile(stem + r"\.(\w+\.\d+-of-\d+\.npz(\.tmp)?|json\.tmp)")
            for name in filter(ours.fullmatch, durable.names(folder)):
                if name not in kept:
                    durable.remove(durable.join(folder, name))


def remove_unlisted(folder: str, table: str, file: str) -> None:
    """Removes a file of a dump that has failed, unless the table's manifest lists it already."""
    path = _path_of(folder, table)
    text = durable.read(path) if durable.exists(path) else b""
    if json.dumps(file).encode() not in text:
        durable.remove(durable.join(folder, file))


def _path_of(folder, table):
    return durable.join(folder, f"{file_stem(table)}.json")


def only_table(folder: str) -> str | None:
    """The table of a folder with one dump; None if it has several, or none."""
    names = manifests(folder)
    return _load(folder, names[0])["table"] if len(names) == 1 else None


def manifests(folder: str) -> list[str]:
    """The names of all files in a folder that may be manifests."""
    return [name for name in durable.names(folder) if name.endswith(".json")]


def read_manifest(folder: str, table: str, dim: int | None) -> Dump:
    """Reads the manifest of a table's dump; `dim` None: rows may have any width."""
    path = _path_of(folder, table)
    if not durable.exists(path):
        tables = [name.removesuffix(".json") for name in manifests(folder)]
        lost = ", and shards of the table without their manifest; copy the manifest, too"
        raise FileNotFoundError(
            f"A dump of table '{table}' is required at {path}. Received: a folder with dumps of "
            f"{tables or 'no table'}{lost if has_shards(folder, table) else ''}"
        )
    manifest = _load(folder, f"{file_stem(table)}.json", len(table))
    if manifest["table"] != table:
        received = f"{manifest['table']!r:.80}"
        raise durable.wrong(path, f"be the manifest of table '{table}'", received)
    if manifest["dim"] != dim and dim is not None:
        raise ValueError(
            f"Table '{table}' has rows of {dim} floats. Received: a dump with rows of "
            f"{manifest['dim']!r:.80} in {path}"
        )
    identity = manifest["sha256"]
    dump = _dump_of(folder, table, manifest, identity)
    dump.dim = manifest["dim"]
    dump.may_grow = manifest["deltas"] is not None
    for delta in manifest["deltas"] or ():
        before = dump.deltas[-1] if dump.deltas else dump
        if delta["since"] != before.name:
            received = f"a delta that follows {delta['since']!r:.80} after {before.name!r:.80}"
            raise durable.wrong(path, "list the deltas of one dump in order", received)
        dump.deltas.append(_dump_of(folder, table, delta, identity))
    return dump


def chain_to(base: Dump, wanted: str | int, argument: str, table: str) -> list[Dump]:
    """The base and its deltas up to the last dump with this name or step."""
    chain = [base, *base.deltas]
    step = -1 if isinstance(wanted, str) else wanted
    matching = [wanted in ("last", dump.name) or dump.step == step >= 0 for dump in chain]
    if not any(matching):
        known = ", ".join(f"{each.name!r} at step {each.step}" for each in chain)
        raise wrong_argument(argument, f"a dump of table '{table}' in this folder: {known}", wanted)
    return chain[: len(chain) - matching[::-1].index(True)]


def read_all(folder: str) -> dict[str, Dump]:
    """The dumps in a folder, by table."""
    dumps = {}
    for name in manifests(folder):
        stem = name.removesuffix(".json")
        if any(each.startswith(f"{stem}.") and each != name for each in durable.names(folder)):
            table = _load(folder, name)["table"]
            dumps[table] = read_manifest(folder, table, None)
    return dumps


def _dump_of(folder, table, fields, identity):
    """The files that a manifest, or one of its deltas, lists."""
    names = [entry["file"] for entry in fields["shards"]]
    path = _path_of(folder, table)
    pattern = re.escape(file_stem(table)) + r"\.(\w+)\.0-of-(\d{1,9})\.npz"
    first = re.fullmatch(pattern, names[0] if names else "")
    world_size = int(first[2]) if first else 0
    ranks = range(min(world_size, len(names) + 1))  # the manifest may name any number
    if first is None or names != [shard_name(table, first[1], r, world_size) for r in ranks]:
        required = "list one shard file per rank of one dump"
        raise durable.wrong(path, required, f"{names!r:.300}")
    files = [durable.join(folder, name) for name in names]
    for file in files:
        if not durable.exists(file):
            raise FileNotFoundError(f"The dump {path} needs {file}, which is missing")
    return Dump(files, fields["shards"], identity, fields["dump"], fields["step"])


def has_shards(folder: str, table: str) -> bool:
    """Whether a folder has any shard of the table, in a dump or without one."""
    shard = re.compile(re.escape(file_stem(table)) + r"\..*-of-.*\.npz")
    return any(map(shard.fullmatch, durable.names(folder)))


def _load(folder, name, name_length=_MAX_NAME):
    """Reads a manifest and checks the fields of its version."""
    path = durable.join(folder, name)

    def without_repeats(pairs):
        fields = dict(pairs)
        if len(fields) != len(pairs):
            raise ValueError(f"a duplicate field among {[name for name, _ in pairs]!r:.200}")
        return fields

    try:
        num_bytes, num_files = durable.size(path), len(durable.names(folder))
        if num_bytes > _REST + _PER_CHARACTER * name_length + _PER_FILE * num_files:
            raise ValueError(f"{num_bytes} bytes in a folder of {num_files} files")
        manifest = json.loads(durable.read(path), object_pairs_hook=without_repeats)
    except (ValueError, RecursionError) as error:
        raise durable.wrong(path, "be a manifest in JSON", error) from error
    if not isinstance(manifest, dict) or manifest.get("format") != FORMAT:
        raise ValueError(f"{path} must be the manifest of a '{FORMAT}' dump")
    version = manifest.get("version")
    if type(version) is not int or version != VERSION:
        received = f"version {version!r:.80}; dump again, or use the sok_like that wrote it"
        raise durable.wrong(path, f"be of version {VERSION}", received)

    def require(holds, received):
        if not holds:
            raise durable.wrong(path, "be a whole manifest", received)

    def has(value, fields):
        return type(value) is dict and {name: type(item) for name, item in value.items()} == fields

    require(manifest.keys() == _FIELDS, f"the fields {sorted(manifest)!r:.200}")
    same = manifest["sha256"] == checksums.of_fields(manifest)
    require(same, "fields whose SHA-256 differs from the one recorded")
    deltas, step = manifest["deltas"], manifest["step"]
    deltas = [] if deltas is None else deltas
    legal = isinstance(deltas, list) and type(step) is int and step >= -1
    require(legal, f"deltas={deltas!r:.80} and step={step!r:.80}")
    for delta in deltas:
        require(has(delta, _DELTA_FIELDS) and delta["step"] >= -1, f"a delta {delta!r:.200}")
    for shards in (manifest["shards"], *(delta["shards"] for delta in deltas)):
        require(isinstance(shards, list), f"shards={shards!r:.80}")
        for shard in shards:
            require(has(shard, _SHARD_FIELDS), f"a shard {shard!r:.200}")
    return manifest


def file_stem(table: str) -> str:
    """A table's name as it appears in file names."""
    # Legal for any table name, and without a dot: "a" must not claim the files of "a.b".
    stem = urllib.parse.quote(table, safe="").replace(".", "%2E") or "_"
    if len(stem) <= _MAX_STEM:
        return stem
    # Quoted names have no "+", so this differs from every other table's name.
    return f"{stem[:_MAX_STEM]}+{hashlib.sha256(table.encode()).hexdigest()[:32]}"
