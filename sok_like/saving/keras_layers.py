"""Hash tables among the weights of a Keras layer: any layer, of this package or not.

    class Own(tf.keras.layers.Layer):                 in the layer's part of a file
        self.user = variable.as_weight()              keys, rows, ..., sha256      or  beside
        self.item = another.as_weight()               1.keys, 1.rows, ...          or  1.beside
        self.scale = self.add_weight(...)             0

Keras stores a layer's variables by number, as arrays. A table is no array. So the methods that
`install.py` wraps leave tables out of the numbered list, and store each under names of its own. On
one rank that is its content, with a checksum. On several it is the name of its dump beside the
file.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from sok_like.runtime import comm
from sok_like.saving import sealed, transaction
from sok_like.saving.hash_pieces import HashPiece
from sok_like.saving.pieces import NotSameOnRanks, Prepared
from sok_like.table import snapshots
from sok_like.table.content import FIELDS, REQUIRED
from sok_like.table.keras_variable import is_keras_3
from sok_like.table.variable import EmbeddingVariable, is_embedding_variable

_BESIDE = "beside"
_NAMES = "|".join((*FIELDS, sealed.CHECKSUM, _BESIDE))
_NAME = re.compile(rf"(?:([1-9]\d*)\.)?({_NAMES})")


def tables_of(layer: Any) -> list[EmbeddingVariable]:
    """The tables among a layer's own weights, each once, in their order."""
    lists = _lists_of(layer)
    return NotSameOnRanks(weight for weights in lists.values() for weight in weights).tables


def track(own: Callable, self: Any, attr: Any) -> Any:
    """Keras 3's `Tracker.track`, of an object that a layer gets as an attribute or in a list.

    Keras 3 would not see a bare table: it would be neither trained nor saved.
    """
    # By its class: the wrapper of a table has the table's attributes.
    if hasattr(type(attr), "as_weight") and "trainable_variables" in self.config:
        attr = attr.as_weight()
    return own(self, attr)


def save(own: Callable, self: Any, store: Any) -> None:
    """`Layer.save_own_variables`."""
    tables = tables_of(self)
    with _without_tables(self, tables):
        own(self, store)
    for number, table in enumerate(tables):
        _save_table(table, store, f"{number}." if number else "")


def load(own: Callable, self: Any, store: Any) -> None:
    """`Layer.load_own_variables`; other keys of the tables are removed.

    Raises:
        ValueError: the file has other tables at this layer's place, or is damaged.
    """
    if hasattr(self, "_update_trackables"):  # tf_keras finds what is in lists only now
        self._update_trackables()
    tables = tables_of(self)
    if not tables:
        own(self, store)
        return
    found, ordinary = _sorted(store)
    _check_number(self, tables, found, store)
    prepared: list[Prepared] = []
    try:
        for table, (prefix, names) in zip(tables, found.items(), strict=True):
            prepared.append(_prepared(table, store, prefix, names))
        with _without_tables(self, tables):
            own(self, {name: store[name] for name in ordinary})
    except BaseException:
        for each in prepared:
            each.drop()
        raise
    for each in prepared:
        transaction.prepare(each)


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


def _save_table(table, store, prefix):
    reference, ranks = transaction.reference_of(table), comm.current().world_size
    if reference is not None:
        store[prefix + _BESIDE] = np.frombuffer(reference.encode(), np.uint8)
        return
    if ranks > 1:
        raise NotImplementedError(
            f"Table '{table.table_name}' is spread over {ranks} ranks and is saved with its model: "
            "model.save('x.keras'), model.save_weights('x.weights.h5'), or by sok.Saver"
        )
    content = table.snapshot().fields()
    arrays = {name: np.asarray(value) for name, value in content.items()}
    arrays["slot_names"] = _bytes_of_names(arrays["slot_names"])
    sealed.write(store, arrays.items(), prefix)


# ---- reading ----


def _sorted(store):
    """The names of each table, by prefix, and the other names."""
    tables: dict[str, set[str]] = {}
    ordinary = []
    for name in store.keys():
        found = _NAME.fullmatch(name)
        if found is None:
            ordinary.append(name)
        else:
            prefix = name.removesuffix(found[2])
            tables.setdefault(prefix, set()).add(found[2])
    return dict(sorted(tables.items(), key=lambda item: int(item[0][:-1] or 0))), ordinary


def _check_number(layer, tables, found, store):
    required = [f"{number}." if number else "" for number in range(len(tables))]
    if list(found) != required:
        names = [table.table_name for table in tables]
        raise ValueError(
            f"The file must hold {len(tables)} table(s) at the place of layer '{layer.name}', for "
            f"{names}. Received: a file with {len(found)} table(s) there, among "
            f"{sorted(store.keys())!r:.200}; it is that of a model with other features or layers"
        )


def _prepared(table, store, prefix, names):
    """The table's new content, which it takes when all of the file is read."""
    if _BESIDE in names:
        reference = np.asarray(store[prefix + _BESIDE]).tobytes().decode()
        return HashPiece(table).prepare(transaction.folder_read(reference))
    name = table.table_name
    missing = {*REQUIRED} - names
    if missing:
        raise ValueError(
            f"The file must hold all of table '{name}'. Received: a file without its "
            f"{sorted(missing)}"
        )
    sealed.check(store, names, prefix, f"table '{name}'")
    fields = {field: np.asarray(store[prefix + field]) for field in FIELDS if field in names}
    keys, rows = fields["keys"], fields["rows"]
    if keys.ndim != 1 or rows.shape != (len(keys), table.dim):
        raise ValueError(
            f"Table '{name}' has rows of {table.dim} floats. Received: a file with keys of shape "
            f"{keys.shape} and rows of shape {rows.shape}"
        )
    fields["slot_names"] = _names_of_bytes(fields["slot_names"])
    return HashPiece(table).prepare_content(**snapshots.owned(fields))


def _bytes_of_names(names):
    return np.frombuffer(b"\n".join(names.tolist()), np.uint8)


def _names_of_bytes(array):
    return np.asarray(array.tobytes().split(b"\n") if len(array) else [], dtype=object)
