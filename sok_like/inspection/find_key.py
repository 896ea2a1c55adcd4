"""`sok.find_key`: where a key still is, in memory and in files.

Every kind of file of this package is looked at, by the names of the files:

    *.npz, *.npz.tmp        shards of dumps and deltas, also those that no manifest lists
    *_keys.file, *-key      keys of SOK 1.x; of SOK 2.x
    *.index                 checkpoints of TensorFlow, variables of SavedModels, deltas of servers
    *.keras, *.h5           files of Keras

A file is searched, not trusted: what a dump has replaced, or a killed process has left, counts.
"""

import io
import itertools
import json
import os
import re
import urllib.parse
import zipfile
from collections.abc import Callable, Container, Iterator
from typing import Any, NamedTuple

import h5py
import numpy as np
import tensorflow as tf

from sok_like.inspection.sizes import tables_of
from sok_like.lookup.buckets import Layout, choices
from sok_like.runtime.checks import as_integer, require, wrong_argument
from sok_like.runtime.ranks import comm
from sok_like.runtime.ranks.agreement import agreed
from sok_like.saving.format import durable
from sok_like.saving.parts.table_names import name_of
from sok_like.table.policies import CBFFilter

_ROW, _WAITS, _COUNTED = "its row", "it waits in the filter", "perhaps counted by a Bloom filter"
_NAMED = "its number in the index"
_SAID_BY = {"keys": _ROW, "waiting": _WAITS, "erased": "listed as erased", "counters": _COUNTED}
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


def find_key(key: int, *places: Any, table: str | None = None) -> list[KeyPlace]:
    """Lists where a key is: what is left of a user whom `erase` has removed.

    Every rank must call this, with the same arguments. Tables are asked on all ranks. Files are
    read on rank 0, each with all its keys, at 8 bytes per key. Whatever a file holds counts, also
    a row that a later delta has replaced, and shards that a killed dump has left.

    Args:
        key: An integer.
        places: Where to look:
            tables, and models, layers and modules with tables: rows and filters of all ranks;
            models that `tf.saved_model.load` returned, as servers have them;
            files and folders (`str` or `os.PathLike`): dumps and deltas of `sok.Saver`, dumps of
            SOK 1.x and 2.x, checkpoints, backups, files of Keras, exports and their deltas. Folders
            are searched with all that is in them. So are `.tables` and `.deltas` beside a path.
        table: Name of the table, with or without its layer's; None: the key in any table. A place
            that does not know its table's name is listed in any case.

    Returns:
        One `KeyPlace` per place, on every rank; empty: none of the places has the key. Its `what`
        begins with "perhaps" where the place cannot tell: a Bloom filter, rows in the buffer of
        `pop_evicted`, a file that cannot be read.

    Raises:
        TypeError: there is no place, a place is something else, or `key` is no integer.
        ValueError: neither int64 nor uint64 can hold `key`, or no table has the name `table`.
        FileNotFoundError: there is no such file; on several ranks RuntimeError.
    """
    number = as_integer(key)
    if number is None:
        raise wrong_argument("key", "an integer", key, error=TypeError)
    require(-(2**63) <= number < 2**64, "key", "a number that int64 or uint64 can hold", key)
    if not places:  # an empty list would say that the key is gone
        raise wrong_argument("places", "tables, models, files or folders", places, error=TypeError)
    number -= 2**64 if number >= 2**63 else 0  # as tables and files store it
    communicator = comm.current_or_single()

    def looked_at():
        of_rank = []
        for place in places:
            if isinstance(place, (str, os.PathLike)):
                of_rank += _in_files(number, os.fspath(place)) if not communicator.rank else []
            elif hasattr(place, "tensorflow_version"):  # that wrote a SavedModel
                of_rank += _in_server(number, place)
            else:
                for held in tables_of(place):
                    of_rank += _in_table(number, held)
        return list(dict.fromkeys(of_rank))

    of_ranks = agreed(looked_at, communicator, "sok.find_key")
    everything = [KeyPlace(*place) for of_rank in of_ranks for place in of_rank]
    named = [place for place in everything if not table or _may_be(place.table, table)]
    if everything and not named:
        tables = sorted({place.table for place in everything})
        raise wrong_argument("table", f"the name of a table in `places`, one of {tables}", table)
    return list(dict.fromkeys(place for place in named if place.what))


def _may_be(name, wanted):
    """Whether what a place knows of a table's name may be this one's; some know its end alone."""
    return not name or f"/{name}".endswith(f"/{wanted}") or f"/{wanted}".endswith(f"/{name}")


def _places(kind, where, table, whats):
    """The places in a table that was looked at, whether it has the key or not."""
    yield KeyPlace("", "", table, "")
    yield from (KeyPlace(kind, where, table, what) for what in whats)


def _in_table(key, table):
    communicator, limit = comm.current_or_single(), table.key_limit
    where = f"on rank {communicator.rank}"
    name, option = table.table_name, table.options["ev_option"]
    # Without an index other keys raise.
    is_legal = not limit or (
        0 <= key < limit and key % communicator.world_size == communicator.rank
    )
    whats = [_ROW] if is_legal and bool(table.find([key])[1][0]) else []
    if table.keeps_records:
        seen = table.key_statistics([key])
        if not seen.present[0] and seen.frequencies[0] > 0:
            whats.append(_COUNTED if isinstance(option.filter_option, CBFFilter) else _WAITS)
        if table.statistics().buffered:
            whats.append("perhaps a row that waits for `pop_evicted`")
    return _places("table", where, name, whats)


def _in_server(key, model):
    places, tables = [], getattr(model, "tables", None)
    if tables is None or not all(hasattr(served, "about") for served in tables):
        required = "a SavedModel that sok.export_saved_model of this version has written"
        raise wrong_argument("places", required, model, error=TypeError)
    for number, served in enumerate(tables):
        about = _read_about(served.about.numpy())
        keys = None if about.layout is None else model.tables_keys.numpy()
        whats = _in_buckets(key, keys, about)
        places += _places("server", f"table {number}", about.table_name, whats)
    return places


def _in_files(key, path) -> Iterator[KeyPlace]:
    """The places of a key in a file or a folder, and in what belongs to it."""
    path = path.rstrip("/") or path
    beside = [path, f"{path}.index", f"{path}.tables", f"{path}.deltas"]
    roots = [root for root in beside if durable.exists(root)]
    if not roots:
        raise FileNotFoundError(f"`find_key` needs a file or a folder. Received: {path!r}")
    in_roots = (durable.files_below(r) if durable.is_folder(r) else [r] for r in roots)
    for file in itertools.chain.from_iterable(in_roots):
        for reader in (r for pattern, r in _READERS.items() if re.search(pattern, file)):
            try:
                yield from reader(key, file)
            except Exception as error:  # of any library, for damaged bytes
                text = f"perhaps the key; {type(error).__name__}: {error}"
                yield KeyPlace("unreadable file", file, "", f"{text:.120}")


def _in_arrays(
    key, names: Container[str], read: Callable[[str], Any], prefix: str = ""
) -> Iterator[str]:
    """What the arrays of a table's content say, those of them that are there."""
    for name, what in _SAID_BY.items():
        if prefix + name in names:
            array = read(prefix + name)
            numbers = array[:, 0] if array.ndim > 1 else array
            if array.any() if name == "counters" else np.any(numbers == key):
                yield what


def _in_shard(key, path):
    named = _SHARD.fullmatch(os.path.basename(path))
    with durable.open_to_read(path) as file, np.load(file, allow_pickle=False) as arrays:
        if named is None or "rows" not in arrays:  # shards of dense tables
            return
        kind = "delta" if "erased" in arrays else "dump"
        whats = _in_arrays(key, arrays, arrays.__getitem__)
        table = urllib.parse.unquote(named[1])
        if "+" in named[1]:  # the name was shortened
            manifest = durable.join(os.path.dirname(path), f"{named[1]}.json")
            table = json.loads(durable.read(manifest))["table"] if durable.exists(manifest) else ""
        yield from _places(kind, path, table, whats)


def _in_keys_of_sok1(key, path):
    manifest, data = f"{path.removesuffix('_keys.file')}.json", durable.read(path)
    dtypes = [np.dtype("<i8"), np.dtype("<u4")]
    if durable.exists(manifest):
        dtypes = [np.dtype(json.loads(durable.read(manifest))["key_dtype"]).newbyteorder("<")]
    whole = [np.frombuffer(data, dtype) for dtype in dtypes if len(data) % dtype.itemsize == 0]
    name = urllib.parse.unquote(os.path.basename(path).removesuffix("_keys.file"))
    whats = [_ROW] if any(np.any(keys == key) for keys in whole) else []
    yield from _places("dump of SOK 1", path, name, whats)


def _in_keys_of_sok2(key, path):
    data = durable.read(path)
    dtype = int.from_bytes(data[292:296], "big")
    keys = np.frombuffer(data[296:], ["<i4", "<i8", "<u4", "<u8"][dtype])
    whats = [_ROW] if np.any(keys.astype(np.int64) == key) else []
    # It has the table's name with "_" in the place of punctuation, which matches no other.
    yield from _places("dump of SOK 2", path, "", whats)


def _in_checkpoint(key, path):
    reader = tf.train.load_checkpoint(path.removesuffix(".index"))
    names = set(reader.get_variable_to_shape_map())
    for name in sorted(names):
        table, _, field = name.rpartition("/.ATTRIBUTES/")
        if field == "keys":
            # TensorFlow knows the attribute that holds the table, and not the table's name.
            whats = _in_arrays(key, names, reader.get_tensor, name.removesuffix("keys"))
            yield from _places("checkpoint", f"{path} ({table})", "", whats)
        elif exported := re.fullmatch(rf"tables/(\d+)/about{_VALUE}", name):
            yield from _in_export(key, path, reader, int(exported[1]))
        elif re.fullmatch(rf"table_\d+_rows{_VALUE}", name):
            raise ValueError("an export of another version of sok_like; export the model again")
        elif delta := re.fullmatch(r"table_(\d+)/buckets", name):
            export = os.path.dirname(path).removesuffix(".deltas")  # it may be beside the folder
            about = _about(durable.join(export, "variables", "variables"), int(delta[1]))
            buckets, keys = reader.get_tensor(name), reader.get_tensor(f"table_{delta[1]}/keys")
            whats = _in_buckets(key, keys, about, buckets, _NAMED)
            yield from _places("export delta", path, about.table_name, whats)


def _about(prefix, number):
    """Table `number` of the SavedModel with variables at `prefix`, if there is one."""
    name = f"tables/{number}/about{_VALUE}"
    reader = tf.train.load_checkpoint(prefix) if durable.exists(f"{prefix}.index") else None
    has_it = reader is not None and reader.has_tensor(name)
    return _read_about(reader.get_tensor(name)) if has_it else _About()


def _in_export(key, path, reader, number):
    about = _about(path.removesuffix(".index"), number)
    keys = None if about.layout is None else reader.get_tensor(f"tables_keys{_VALUE}")
    yield from _places("export", path, about.table_name, _in_buckets(key, keys, about))
    if keys is None:
        return
    folder = f"{os.path.dirname(os.path.dirname(path))}.deltas"
    deltas = [file for file in durable.names(folder) if file.endswith(".index")]
    parts = [f"table_{number}/{part}" for part in ("buckets", "keys")]
    for file in deltas:
        delta = tf.train.load_checkpoint(durable.join(folder, file.removesuffix(".index")))
        if delta.has_tensor(parts[0]):
            at, new = map(delta.get_tensor, parts)
            keys[at] = new
    if deltas:
        whats = _in_buckets(key, keys, about, what=f"{_ROW}, in a server that took all deltas")
        yield from _places("server", folder, about.table_name, whats)


class _About(NamedTuple):
    """A table of a SavedModel; by default one of which nothing is known."""

    table_name: str = ""
    layout: Layout | None = None  # None also without an index
    first_bucket: int = 0  # in the index of all tables
    num_rows: int = 0


def _read_about(text):
    """What a SavedModel says of a table."""
    about = _About(**json.loads(bytes(text)))
    return about._replace(layout=Layout(*about.layout)) if about.layout else about


def _in_buckets(key, keys, about, at=None, what=_ROW):
    """`what`, if a slot of the buckets with the numbers `at` (None: of all) has the key."""
    if keys is None:  # without an index: key k is row k
        return [what] if 0 <= key < about.num_rows else []
    # A delta whose export is elsewhere has no layout: a small key may be a free slot's number.
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

        def read(name):
            return stored[name][()]

        names: list[str] = []
        stored.visit(names.append)
        for name in names:
            group, _, last = name.rpartition("/")
            prefix = last.removesuffix("keys")
            if last.endswith("keys") and f"{group}/{prefix}rows" in stored:
                table = name_of(prefix.removesuffix("."))
                whats = _in_arrays(key, stored, read, f"{group}/{prefix}")
                yield from _places("file of Keras", path, table, whats)


_READERS: dict[str, Callable[[int, str], Iterator[KeyPlace]]] = {
    r"\.npz(\.tmp)?$": _in_shard,
    r"_keys\.file$": _in_keys_of_sok1,
    r"-key$": _in_keys_of_sok2,
    r"\.index$": _in_checkpoint,
    r"\.(keras|h5)$": _in_keras_file,
}
