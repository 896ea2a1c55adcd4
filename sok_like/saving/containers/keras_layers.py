"""Tables among the weights of a Keras layer, in Keras' files: of any layer, of this package or not.

    class Own(tf.keras.layers.Layer):                 in the layer's part of a file
        self.user = variable.as_weight()              =user.keys, ..., =user.sha256
        self.item = another.as_weight()               =item.beside
        self.scale = self.add_weight(...)             0
    dmp.DistributedEmbedding                          dense.=user, dense.=user.momentum, ...

Keras stores a layer's variables by number, as arrays. So the methods that `install.py` wraps leave
tables out of the numbered list, and store each under its key, by which it is found again
(`table_names.py`): its content, with a checksum, or on several ranks the name of a folder beside
the file. Number 0 is not written: `keys`, `1.keys`.

Keras visits layers and optimizers in any order. So slot variables of dense tables are stored with
their tables (`dense_tables.py`), and both are read once Keras has visited all of a model.
"""

import collections
import contextlib
import functools
import re
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from sok_like.runtime.framework import hooks
from sok_like.runtime.framework.running_keras import is_keras_3
from sok_like.runtime.framework.scoped_attributes import attributes
from sok_like.runtime.ranks import comm
from sok_like.saving import transaction
from sok_like.saving.format import checksums, durable
from sok_like.saving.parts import dense_tables, table_names
from sok_like.saving.parts.checkpointable import RankLocalVariables, StagedContent
from sok_like.saving.parts.hash_tables import HashTablePart
from sok_like.table import snapshots
from sok_like.table.content import FIELDS, REQUIRED, TableContent
from sok_like.table.slices import TableSlice
from sok_like.table.variable import EmbeddingVariable, is_embedding_variable

HOLDER = "tables"  # the id of the only holder in a folder
_BESIDE = "beside"  # the name of a folder
_RANKS = "ranks"  # how many have written a folder of dense tables
_ARRAYS = "|".join((*FIELDS, checksums.OF_ARRAYS, _BESIDE))
_KEY = re.compile(rf"(?:([1-9]\d*|=[^.]+)\.)?({_ARRAYS})")
_DENSE = "dense."
# While Keras writes a file: .references: of folders beside it, by the `id` of what they hold. While
# it reads one: .partial: whether tables that the file lacks may start empty; .loaded: holders of
# dense tables with what the file has of them.
_now = threading.local()


def tables_of(layer: Any) -> list[EmbeddingVariable]:
    """The tables among a layer's own weights, each once, and those of its `tables_in_files`."""
    weights = [weight for weights in _lists_of(layer).values() for weight in weights]
    return RankLocalVariables([*weights, *getattr(layer, "tables_in_files", ())]).tables


def holders_of(model: Any) -> list[Any]:
    """The holders of a model's layers, in the same order on all ranks."""
    layers = model._flatten_layers() if hasattr(model, "_flatten_layers") else ()
    holders = [getattr(layer, "dense_in_files", None) for layer in layers]
    return list({id(holder): holder for holder in holders if holder is not None}.values())


def optimizers_of(model: Any) -> list[Any]:
    """The optimizer of a model if Keras' files hold it."""
    # They hold nothing of tf_keras' legacy optimizers.
    optimizer = getattr(model, "optimizer", None)
    return [optimizer] if hasattr(optimizer, "save_own_variables") else []


def track(own: Callable, self: Any, attr: Any) -> Any:
    """Keras 3's `Tracker.track`: a bare table is put in a variable that Keras sees."""
    if isinstance(attr, tf.keras.layers.Layer):  # of a model from before `sok.Init`, perhaps
        hooks.open_door(hooks.MODELS)
    # By its class: the wrapper of a table has the table's attributes.
    if hasattr(type(attr), "as_weight") and "trainable_variables" in self.config:
        attr = attr.as_weight()
    return own(self, attr)


def _lists_of(layer):
    names = "_trainable_{0} _non_trainable_{0}".format("variables" if is_keras_3() else "weights")
    return {name: vars(layer).get(name, ()) for name in names.split()}


@contextlib.contextmanager
def _without_tables(layer: Any, tables: list[Any]) -> Iterator[None]:
    """A scope in which the layer's lists of weights have no tables."""
    if not tables:
        yield
        return
    lists = _lists_of(layer)
    # Past `__setattr__`, by which Keras would track the lists.
    for name, weights in lists.items():
        vars(layer)[name] = [each for each in weights if not is_embedding_variable(each)]
    vars(layer)["_update_trackables"] = lambda: None  # tf_keras would put them back
    try:
        yield
    finally:
        del vars(layer)["_update_trackables"]
        vars(layer).update(lists)


# ---- writing ----


def writing(
    objects: Sequence[Any], references: Sequence[str]
) -> contextlib.AbstractContextManager[None]:
    """A scope in which what Keras writes of tables is the name of their folder."""
    return attributes(_now, {"references": dict(zip(map(id, objects), references, strict=True))})


def is_writing() -> bool:
    """Whether such a scope is active."""
    return hasattr(_now, "references")


def save(own: Callable, self: Any, store: Any) -> None:
    """`Layer.save_own_variables`."""
    tables, holder = tables_of(self), getattr(self, "dense_in_files", None)
    if holder is None:
        with _without_tables(self, tables):
            own(self, store)
    elif holder.shapes():
        if _save_reference(store, _DENSE, holder, f"The tables of layer '{holder.name}' are"):
            store[_DENSE + _RANKS] = np.array([comm.current().world_size])
        else:
            wholes = (
                (key, (tf.cast(value, tf.float32) if value.dtype == tf.bfloat16 else value).numpy())
                for key, value in dense_tables.wholes_of(holder)
            )
            checksums.write_arrays(store, wholes, _DENSE)
    names = table_names.within(self.name, [table.table_name for table in tables])
    for number, (table, name) in enumerate(zip(tables, names, strict=True)):
        key = table_names.key_of(name, number)
        prefix = "" if key == "0" else f"{key}."
        if _save_reference(store, prefix, table, f"Table '{table.table_name}' is"):
            continue
        content = table.snapshot().fields()
        arrays = {name: np.asarray(value) for name, value in content.items()}
        slots = b"\n".join(arrays["slot_names"].tolist())
        arrays["slot_names"] = np.frombuffer(slots, np.uint8)
        checksums.write_arrays(store, arrays.items(), prefix)


def _save_reference(store, prefix, thing, what):
    """Writes the name of the folder beside the file that has a thing; on several ranks it must."""
    reference = vars(_now).get("references", {}).get(id(thing))
    ranks = comm.current().world_size
    if reference is not None:
        store[prefix + _BESIDE] = np.frombuffer(reference.encode(), np.uint8)
    elif ranks > 1:
        raise NotImplementedError(
            f"{what} spread over {ranks} ranks and saved with the model: model.save('x.keras'), "
            "model.save_weights('x.weights.h5'); sok.Saver saves hash tables alone"
        )
    return reference is not None


# ---- reading ----


def load_state(own: Callable, *args: Any, **kwargs: Any) -> Any:
    """`saving_lib._load_state`, Keras' walk through what it loads; it calls itself."""
    if kwargs["inner_path"] if "inner_path" in kwargs else args[3]:
        return own(*args, **kwargs)
    partial, loaded = bool(kwargs.get("skip_mismatch")), list[Any]()
    with attributes(_now, {"partial": partial, "loaded": loaded}):
        result = own(*args, **kwargs)
    if kwargs.get("failed_saveables") and not partial:  # Keras raises next
        return result
    # The two Kerases have different names for the first argument, the model.
    with dense_tables.of_root(optimizers_of(args[0])):
        for holder, stored in loaded:
            parts = dense_tables.parts_of(holder)
            expected = {part.key.partition(".")[2] for part in parts if "." in part.key}
            received = stored.slot_names()
            if expected and received and expected != received:  # Keras, too, keeps the state then
                warnings.warn(
                    f"The optimizer's state of layer '{holder.name}' is not loaded: the optimizer "
                    f"has the slot variables {sorted(expected)}, the file {sorted(received)}",
                    stacklevel=2,
                )
                parts = [part for part in parts if "." not in part.key]
            stored.check(holder, parts)
            transaction.prepare(stored.prepare(parts))
    return result


def load(own: Callable, self: Any, store: Any) -> None:
    """`Layer.load_own_variables`; other keys of the tables are removed."""
    if hasattr(self, "_update_trackables"):  # tf_keras finds what is in lists only now
        self._update_trackables()
    tables, holder = tables_of(self), getattr(self, "dense_in_files", None)
    if holder is not None and holder.shapes():
        _load_dense(holder, store)
    if not tables:
        if holder is None:
            own(self, store)
        return
    ordinary, stored = _sorted(store)
    expected = table_names.within(self.name, [table.table_name for table in tables])
    received = [name for name, _ in stored]
    pairs, problem = table_names.matched(self.name, expected, received, "The file")
    _check(problem, bool(pairs))
    prepared: list[StagedContent] = []
    try:
        for i, place in pairs:
            try:
                prepared.append(_prepared(tables[i], stored[place][1]))
            except ValueError as error:
                _check(str(error), some_match=True)
        if holder is None:
            with _without_tables(self, tables):
                own(self, ordinary)
    except BaseException:
        for content in prepared:
            content.drop()
        raise
    for content in prepared:
        transaction.prepare(content)


def _check(problem, some_match):
    """Raises ValueError if tables do not match, or only warns if Keras may skip some."""
    if problem and not (vars(_now).get("partial") and some_match):
        raise ValueError(problem)
    if problem:
        warnings.warn(table_names.PARTIAL.format(problem=problem), stacklevel=2)


class _Arrays(collections.UserDict):
    """Arrays with a prefix in a store of Keras; each is read where it is used."""

    def __init__(self, store, prefix, names):
        super().__init__({name: prefix + name for name in names})
        self._store = store

    def __getitem__(self, name):
        return np.asarray(self._store[self.data[name]])


def _sorted(store):
    """The ordinary arrays of a layer, and each table's name with its arrays."""
    tables: dict[str, set[str]] = {}
    ordinary = set()
    for key in store.keys():
        of_table = _KEY.fullmatch(key)
        if of_table is None:
            ordinary.add(key)
        else:
            tables.setdefault(key.removesuffix(of_table[2]), set()).add(of_table[2])
    stored = []
    for prefix in sorted(tables, key=table_names.order):
        name = table_names.name_of(prefix.removesuffix("."))
        stored.append((name, _Arrays(store, prefix, tables[prefix])))
    return _Arrays(store, "", ordinary), stored


def _prepared(table, stored):
    """The table's new content, which it takes when all of the file is read."""
    if _BESIDE in stored:
        folder = transaction.folder_read(stored[_BESIDE].tobytes().decode())
        return HashTablePart(table).prepare(folder)
    name = table.table_name
    missing = {*REQUIRED} - stored.keys()
    if missing:
        received = f"a file without its {sorted(missing)}"
        raise durable.wrong("The file", f"hold all of table '{name}'", received)
    checksums.check_arrays(stored, f"table '{name}'")
    fields = {field: stored[field] for field in FIELDS if field in stored}
    keys, rows = fields["keys"], fields["rows"]
    if keys.ndim != 1 or rows.ndim != 2 or len(rows) != len(keys):
        raise ValueError(
            f"Table '{name}' has rows of {table.dim} floats. Received: a file with keys of shape "
            f"{keys.shape} and rows of shape {rows.shape}"
        )
    names = fields["slot_names"].tobytes().split(b"\n") if len(fields["slot_names"]) else []
    fields["slot_names"] = np.asarray(names, dtype=object)
    return HashTablePart(table).prepare_content(snapshots.owned(TableContent(**fields)))


def _load_dense(holder, store):
    """Reads the tables of a holder, at the end of `load_state`."""
    with dense_tables.of_root(()):
        parts = dense_tables.parts_of(holder)
    names = [key.removeprefix(_DENSE) for key in store.keys() if key.startswith(_DENSE)]
    arrays = _Arrays(store, _DENSE, names)

    def matched(tables):
        keys, problem = dense_tables.match(holder, tables, "The file")
        _check(problem, bool(keys))
        return keys

    if _RANKS in arrays:
        folder = transaction.folder_read(arrays[_BESIDE].tobytes().decode())
        in_folder = dense_tables.read_folder(folder, int(arrays[_RANKS][0]))
        stored = in_folder.get(HOLDER, dense_tables.NO_TABLES)
        stored = stored.renumbered(matched(stored.tables()))
    else:
        keys = matched([key for key in names if re.fullmatch(r"\d+|=[^.]+", key)])
        checksums.check_arrays(arrays, f"the tables of layer '{holder.name}'")
        # This rank's slices of whole tables and slot variables, which are copied at once.
        slices, places = {}, {part.key: part.held.place for part in parts}
        for key in names:
            table, dot, slot = key.partition(".")
            if table in keys:
                place = places.get(keys[table], TableSlice((0, 0), (0, 0)))
                whole = arrays[key]
                read = functools.partial(np.asarray, np.array(whole[place.slices]))
                slices[f"{keys[table]}{dot}{slot}"] = whole.shape, place, read
        stored = dense_tables.StoredTables.of_slices(slices)
    stored.check(holder, parts)
    if hasattr(_now, "loaded"):
        _now.loaded.append((holder, stored))
    else:
        transaction.prepare(stored.prepare(parts))
