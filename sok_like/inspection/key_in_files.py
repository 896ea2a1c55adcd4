"""Where the files of this package hold a key: every kind is looked at, by the names of the files.

    *.npz, *.npz.tmp        shards of dumps and deltas, also those that no manifest lists
    *_keys.file, *-key      keys of SOK 1.x; of SOK 2.x
    *.index                 checkpoints of TensorFlow, variables of SavedModels, deltas of servers
    *.keras, *.h5           files of Keras

A file is searched, not trusted: what a dump has replaced, or a killed process has left, counts.
"""

from __future__ import annotations

import io
import json
import os
import re
import urllib.parse
import zipfile
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import h5py
import numpy as np
import tensorflow as tf

from sok_like.lookup.buckets import Layout, choices
from sok_like.saving.format import durable
from sok_like.saving.parts.table_names import name_of

ROW, WAITS, COUNTED = "its row", "it waits in the filter", "perhaps counted by a Bloom filter"
ERASED, NAMED = "listed as erased", "its number in the index"
_SHARD = re.compile(r"(.+)\.\w+\.\d+-of-\d+\.npz(\.tmp)?")
_VALUE = "/.ATTRIBUTES/VARIABLE_VALUE"
_FREE = 64  # numbers below may stand in free slots


class KeyPlace(NamedTuple):
    """A place that has a key."""

    kind: str  # "table", "server", "dump", "delta", "checkpoint", "export", "export delta", ...
    where: str  # the table, or the path of the file
    table: str  # its name; what the file knows of it, or "" if nothing
    what: str  # what is there: its row, its count in a filter, or only its number

    def __str__(self) -> str:
        return f"{self.kind} {self.where}, table '{self.table}': {self.what}"


def absent(table: str) -> KeyPlace:
    """What stands for a table that was looked at, whether it has the key or not."""
    return KeyPlace("", "", table, "")


def search(key: int, path: str) -> list[KeyPlace]:
    """The places of a key in a file or a folder, and in what belongs to it.

    Tables without the key are listed as `absent`.

    Raises:
        FileNotFoundError: there is nothing at the path.
    """
    path = path.rstrip("/") or path
    beside = [path, f"{path}.index", f"{path}.tables", f"{path}.deltas"]
    roots = [each for each in beside if durable.exists(each)]
    if not roots:
        raise FileNotFoundError(f"`find_key` needs a file or a folder. Received: {path!r}")
    return [place for root in roots for file in _files(root) for place in _in_file(key, file)]


def _files(path) -> Iterator[str]:
    if not durable.is_folder(path):
        yield path
        return
    for name in durable.names(path):
        yield from _files(durable.join(path, name))


def may_be(name: str, wanted: str | None) -> bool:
    """Whether what a place knows of a table's name may be this one's; some know its end alone."""
    if not (name and wanted):
        return True
    return f"/{name}".endswith(f"/{wanted}") or f"/{wanted}".endswith(f"/{name}")


def _in_file(key, path) -> Iterator[KeyPlace]:
    for pattern, reader in _READERS.items():
        if not re.search(pattern, path):
            continue
        try:
            yield from reader(key, path)
        except Exception as error:  # of any library, for damaged bytes
            text = f"perhaps the key; {type(error).__name__}: {error}"
            yield KeyPlace("unreadable file", path, "", f"{text:.120}")


def _in_arrays(key, get: Callable[[str], Any]) -> Iterator[str]:
    """What the arrays of a table's content say; `get` returns None for those that are not there."""
    tests = {"keys": ROW, "waiting": WAITS, "erased": ERASED}
    for name, what in tests.items():
        array = get(name)
        if array is not None and np.any((array[:, 0] if array.ndim > 1 else array) == key):
            yield what
    counters = get("counters")
    if counters is not None and counters.any():
        yield COUNTED


def _in_shard(key, path):
    named = _SHARD.fullmatch(os.path.basename(path))
    with durable.open_to_read(path) as file, np.load(file, allow_pickle=False) as arrays:
        if named is None or "rows" not in arrays:  # shards of dense tables
            return
        kind = "delta" if "erased" in arrays else "dump"
        whats = _in_arrays(key, lambda name: arrays[name] if name in arrays else None)
        yield from _places(kind, path, _unquoted(named[1], path), whats)


def _unquoted(stem, path):
    name = urllib.parse.unquote(stem)
    if "+" not in stem:
        return name
    manifest = durable.join(os.path.dirname(path), f"{stem}.json")  # the name was shortened
    return json.loads(durable.read(manifest))["table"] if durable.exists(manifest) else ""


def _in_keys_of_sok1(key, path):
    manifest, data = f"{path.removesuffix('_keys.file')}.json", durable.read(path)
    dtypes = [np.dtype("<i8"), np.dtype("<u4")]
    if durable.exists(manifest):
        dtypes = [np.dtype(json.loads(durable.read(manifest))["key_dtype"]).newbyteorder("<")]
    whole = [np.frombuffer(data, dtype) for dtype in dtypes if len(data) % dtype.itemsize == 0]
    name = urllib.parse.unquote(os.path.basename(path).removesuffix("_keys.file"))
    whats = [ROW] if any(np.any(keys == key) for keys in whole) else []
    yield from _places("dump of SOK 1", path, name, whats)


def _in_keys_of_sok2(key, path):
    data = durable.read(path)
    dtype = int.from_bytes(data[292:296], "big")
    keys = np.frombuffer(data[296:], ["<i4", "<i8", "<u4", "<u8"][dtype])
    whats = [ROW] if np.any(keys.astype(np.int64) == key) else []
    # It has the table's name with "_" in the place of punctuation, which matches no other.
    yield from _places("dump of SOK 2", path, "", whats)


def _in_checkpoint(key, path):
    reader = tf.train.load_checkpoint(path.removesuffix(".index"))
    names = set(reader.get_variable_to_shape_map())
    for name in sorted(names):
        table, _, field = name.rpartition("/.ATTRIBUTES/")
        if field == "keys":
            get = _getter(reader, names, f"{table}/.ATTRIBUTES/")
            # TensorFlow knows the attribute that holds the table, and not the table's name.
            yield from _places("checkpoint", f"{path} ({table})", "", _in_arrays(key, get))
        elif exported := re.fullmatch(rf"tables/(\d+)/about{_VALUE}", name):
            yield from _in_export(key, path, reader, int(exported[1]))
        elif exported := re.fullmatch(rf"table_(\d+)_rows{_VALUE}", name):
            yield from _in_old_export(key, path, reader, names, exported[1])
        elif delta := re.fullmatch(r"table_(\d+)/buckets", name):
            about = _about_exported(os.path.dirname(path), int(delta[1]))
            buckets, keys = reader.get_tensor(name), reader.get_tensor(f"table_{delta[1]}/keys")
            whats = in_buckets(key, keys, about, buckets, NAMED)
            yield from _places("export delta", path, about.table_name, whats)


def _places(kind, path, table, whats):
    yield absent(table)
    yield from (KeyPlace(kind, path, table, what) for what in whats)


def _getter(reader, names, prefix):
    return lambda field: reader.get_tensor(prefix + field) if prefix + field in names else None


def _in_export(key, path, reader, number):
    about = _about(reader, number)
    if about.layout is None:
        whats = [ROW] if 0 <= key < about.num_rows else []
        yield from _places("export", path, about.table_name, whats)
        return
    keys = reader.get_tensor(f"tables_keys{_VALUE}")
    yield from _places("export", path, about.table_name, in_buckets(key, keys, about))
    folder = f"{_exported_at(path)}.deltas"
    deltas = [file for file in durable.names(folder) if file.endswith(".index")]
    parts = [f"table_{number}/{part}" for part in ("buckets", "keys")]
    for file in deltas:
        delta = tf.train.load_checkpoint(durable.join(folder, file.removesuffix(".index")))
        if delta.has_tensor(parts[0]):
            at, new = map(delta.get_tensor, parts)
            keys[at] = new
    if deltas:
        whats = in_buckets(key, keys, about, what=f"{ROW}, in a server that took all deltas")
        yield from _places("server", folder, about.table_name, whats)


def _in_old_export(key, path, reader, names, number):
    """Of version 0.1: each table has variables of its own."""
    name = f"table_{number}_keys{_VALUE}"
    if name in names:
        whats = in_buckets(key, reader.get_tensor(name), About())
    else:  # without an index: key k is row k
        num_rows = reader.get_variable_to_shape_map()[f"table_{number}_rows{_VALUE}"][0]
        whats = [ROW] if 0 <= key < num_rows else []
    yield from _places("export", path, "", whats)


def _exported_at(variables):
    return os.path.dirname(os.path.dirname(variables))


def _about_exported(folder, number):
    """The same of the export to which a folder of deltas belongs, if it is beside it."""
    prefix = durable.join(folder.removesuffix(".deltas"), "variables", "variables")
    if not durable.exists(f"{prefix}.index"):
        return About()
    return _about(tf.train.load_checkpoint(prefix), number)


def _about(reader, number):
    name = f"tables/{number}/about{_VALUE}"
    return read_about(reader.get_tensor(name)) if reader.has_tensor(name) else About()


class About(NamedTuple):
    """A table of a SavedModel; by default one of which nothing is known."""

    table_name: str = ""
    layout: Layout | None = None  # None also without an index
    first_bucket: int = 0  # in the index of all tables
    num_rows: int = 0


def read_about(text: Any) -> About:
    """What a SavedModel says of a table."""
    about = About(**json.loads(bytes(text)))
    return about._replace(layout=Layout(*about.layout)) if about.layout else about


def in_buckets(
    key: int, keys: np.ndarray, about: About, at: Any = None, what: str = ROW
) -> list[str]:
    """`what`, if a slot of buckets `[num_buckets, SLOTS]` has the key; else nothing.

    Args:
        about: Without a layout, as of exports of version 0.1, a small number may be that of a free
            slot.
        at: The numbers of the buckets; None: they are all.
    """
    same, layout = (keys == key).any(axis=1), about.layout
    if layout is not None:
        numbers = np.arange(len(keys)) if at is None else at
        pair = np.concatenate(choices(np.array([key], np.int64), layout))
        same &= np.isin(numbers, about.first_bucket + pair)
    if not same.any():
        return []
    return [what if layout is not None or not 0 <= key < _FREE else f"perhaps {what}"]


def _in_keras_file(key, path):
    with durable.open_to_read(path) as file:
        data: Any = io.BytesIO(file.read()) if durable.local(path) is None else path
    if path.endswith(".keras"):
        with zipfile.ZipFile(data) as archive:
            data = io.BytesIO(archive.read("model.weights.h5"))
    with h5py.File(data, "r") as stored:
        names: list[str] = []
        stored.visit(names.append)
        for name in names:
            group, _, last = name.rpartition("/")
            prefix = last.removesuffix("keys")
            if last.endswith("keys") and f"{group}/{prefix}rows" in stored:
                table = name_of(prefix.removesuffix("."))

                def get(field, at=f"{group}/{prefix}"):
                    return stored[at + field][()] if at + field in stored else None

                yield from _places("file of Keras", path, table, _in_arrays(key, get))


_READERS: dict[str, Callable[[int, str], Iterator[KeyPlace]]] = {
    r"\.npz(\.tmp)?$": _in_shard,
    r"_keys\.file$": _in_keys_of_sok1,
    r"-key$": _in_keys_of_sok2,
    r"\.index$": _in_checkpoint,
    r"\.(keras|h5)$": _in_keras_file,
}
