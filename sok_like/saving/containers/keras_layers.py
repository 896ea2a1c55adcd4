"""Hash tables among the weights of a Keras layer: any layer, of this package or not.

    class Own(tf.keras.layers.Layer):                 in the layer's part of a file
        self.user = variable.as_weight()              =user.keys, ..., =user.sha256
        self.item = another.as_weight()               =item.beside
        self.scale = self.add_weight(...)             0

Keras stores a layer's variables by number, as arrays. A table is no array. So the methods that
`install.py` wraps leave tables out of the numbered list, and store each under its key, by which it
is found again (`table_names.py`). On one rank that is its content, with a checksum. On several it
is the name of its dump beside the file.

Number 0 is not written: `keys`, `1.keys`.
"""

import contextlib
import re
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import tensorflow as tf

from sok_like.runtime.framework import hooks
from sok_like.runtime.framework.running_keras import is_keras_3
from sok_like.runtime.framework.scoped_attributes import attributes
from sok_like.runtime.ranks import comm
from sok_like.saving import transaction
from sok_like.saving.format import checksums, durable
from sok_like.saving.parts import table_names
from sok_like.saving.parts.checkpointable import RankLocalVariables, StagedContent
from sok_like.saving.parts.hash_tables import HashTablePart
from sok_like.table import snapshots
from sok_like.table.content import FIELDS, REQUIRED, TableContent
from sok_like.table.variable import EmbeddingVariable, is_embedding_variable

_BESIDE = "beside"
_ARRAYS = "|".join((*FIELDS, checksums.OF_ARRAYS, _BESIDE))
_KEY = re.compile(rf"(?:([1-9]\d*|=[^.]+)\.)?({_ARRAYS})")
_now = threading.local()  # .partial: whether tables that a file lacks may start empty


def tables_of(layer: Any) -> list[EmbeddingVariable]:
    """The tables among a layer's own weights, each once, and those of its `tables_in_files`."""
    weights = [weight for weights in _lists_of(layer).values() for weight in weights]
    return RankLocalVariables([*weights, *getattr(layer, "tables_in_files", ())]).tables


def track(own: Callable, self: Any, attr: Any) -> Any:
    """Keras 3's `Tracker.track`: a bare table is put in a variable that Keras sees."""
    if isinstance(attr, tf.keras.layers.Layer):  # of a model from before `sok.Init`, perhaps
        hooks.open_door(hooks.MODELS)
    # By its class: the wrapper of a table has the table's attributes.
    if hasattr(type(attr), "as_weight") and "trainable_variables" in self.config:
        attr = attr.as_weight()
    return own(self, attr)


def save(own: Callable, self: Any, store: Any) -> None:
    """`Layer.save_own_variables`."""
    tables = tables_of(self)
    with _without_tables(self, tables):
        own(self, store)
    names = table_names.within(self.name, [table.table_name for table in tables])
    for number, (table, name) in enumerate(zip(tables, names, strict=True)):
        key = table_names.key_of(name, number)
        _save_table(table, store, "" if key == "0" else f"{key}.")


def load(own: Callable, self: Any, store: Any) -> None:
    """`Layer.load_own_variables`; other keys of the tables are removed."""
    if hasattr(self, "_update_trackables"):  # tf_keras finds what is in lists only now
        self._update_trackables()
    tables = tables_of(self)
    if not tables:
        own(self, store)
        return
    ordinary, stored = _sorted(store)
    prepared: list[StagedContent] = []
    try:
        for table, arrays in _matched(self, tables, stored):
            try:
                prepared.append(_prepared(table, arrays))
            except ValueError as error:
                check(str(error), some_match=True)
        with _without_tables(self, tables):
            own(self, ordinary)
    except BaseException:
        for content in prepared:
            content.drop()
        raise
    for content in prepared:
        transaction.prepare(content)


def reading(partial: bool) -> contextlib.AbstractContextManager[None]:
    """A scope in which Keras reads a file; with `partial` it may lack tables."""
    return attributes(_now, {"partial": partial})


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


def save_reference(store: Any, prefix: str, thing: Any, what: str) -> bool:
    """Writes the name of the folder beside the file that has a thing; on several ranks it must."""
    reference, ranks = transaction.reference_of(thing), comm.current().world_size
    if reference is not None:
        store[prefix + _BESIDE] = np.frombuffer(reference.encode(), np.uint8)
    elif ranks > 1:
        raise NotImplementedError(
            f"{what} spread over {ranks} ranks and saved with the model: model.save('x.keras'), "
            "model.save_weights('x.weights.h5'); sok.Saver saves hash tables alone"
        )
    return reference is not None


def folder_of(stored: Any) -> str:
    """The folder that it names."""
    return transaction.folder_read(np.asarray(stored[_BESIDE]).tobytes().decode())


def _save_table(table, store, prefix):
    if save_reference(store, prefix, table, f"Table '{table.table_name}' is"):
        return
    content = table.snapshot().fields()
    arrays = {name: np.asarray(value) for name, value in content.items()}
    names = b"\n".join(arrays["slot_names"].tolist())
    arrays["slot_names"] = np.frombuffer(names, np.uint8)
    checksums.write_arrays(store, arrays.items(), prefix)


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
    prefixes = sorted(tables, key=table_names.order)
    stored = [Arrays(store, prefix, tables[prefix]) for prefix in prefixes]
    names = [table_names.name_of(prefix.removesuffix(".")) for prefix in prefixes]
    return Arrays(store, "", ordinary), list(zip(names, stored, strict=True))


class Arrays(Mapping):
    """Arrays with a prefix in a store of Keras; each is read where it is used."""

    def __init__(self, store, prefix, names):
        self._store, self._keys = store, {name: prefix + name for name in names}

    def __getitem__(self, name):
        return np.asarray(self._store[self._keys[name]])

    def __iter__(self):
        return iter(self._keys)

    def __len__(self):
        return len(self._keys)


def _matched(layer, tables, stored):
    """Each table with what the file has of it."""
    expected = table_names.within(layer.name, [table.table_name for table in tables])
    received = [name for name, _ in stored]
    pairs, problem = table_names.matched(layer.name, expected, received, "The file")
    check(problem, bool(pairs))
    return [(tables[i], stored[place][1]) for i, place in pairs]


def check(problem: str, some_match: bool) -> None:
    """Raises ValueError if tables do not match, or only warns if Keras may skip some."""
    if problem and not (vars(_now).get("partial") and some_match):
        raise ValueError(problem)
    if problem:
        warnings.warn(table_names.PARTIAL.format(problem=problem), stacklevel=2)


def _prepared(table, stored):
    """The table's new content, which it takes when all of the file is read."""
    if _BESIDE in stored:
        return HashTablePart(table).prepare(folder_of(stored))
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
