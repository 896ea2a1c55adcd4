"""The tables of a layer in `tf.train.Checkpoint`: children of the layer by their names.

    layer 'feat' -- tables/user --> table 'feat/user'
                 -- tables/item --> table 'feat/item'

TensorFlow finds an object by the attributes, positions and keys that lead to it from the root. For
a table these would be attributes that features number, or positions in a list. So a layer shows
TensorFlow its tables under their names within the layer (`table_names.py`), also those in its lists
and dictionaries. Tables without a name are where TensorFlow finds them.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from sok_like.saving import keras_layers, table_names
from sok_like.table.variable import is_embedding_variable, unwrap

_UNDER = "tables/"
# Earlier versions had a layer for each table of features.
_NUMBERED = re.compile(r"_table_\d+")


def _named(layer):
    """A layer's tables that have a name within it."""
    tables = keras_layers.tables_of(layer)
    names = table_names.within(layer.name, [table.table_name for table in tables])
    return {name: table.as_weight() for name, table in zip(names, tables, strict=True) if name}


def children(own: Callable, self: Any, save_type: str = "checkpoint", **kwargs: Any) -> Any:
    """`Layer._trackable_children`."""
    found, named = own(self, save_type, **kwargs), {}
    if save_type == "checkpoint":
        named = _named(self)
    if not named:
        return found
    tables = {id(unwrap(table)) for table in named.values()}
    others = {name: child for name, child in found.items() if not _are(child, tables)}
    return {**others, **{_UNDER + name: table for name, table in named.items()}}


def _are(child, tables):
    """Whether a child is one of the tables, or a container of nothing else."""
    if is_embedding_variable(child):
        return id(unwrap(child)) in tables
    held = child._trackable_children() if isinstance(child, (list, dict, tuple)) else {}
    return bool(held) and all(_are(each, tables) for each in held.values())


def look_up(own: Callable, self: Any, name: str, cached_dependencies: Any = None) -> Any:
    """`Layer._lookup_dependency`: the child with this name in a checkpoint."""
    if name.startswith(_UNDER):
        (name,) = table_names.renamed(self.name, [name.removeprefix(_UNDER)])
        return _named(self).get(name)
    found = own(self, name, cached_dependencies)
    if found is not None or not cached_dependencies:
        return found
    # The attribute, by which earlier versions stored a table.
    found = own(self, name)
    if not is_embedding_variable(found) or not _NUMBERED.fullmatch(name):
        return found if is_embedding_variable(found) else None
    return _LayerOfEarlier(found)


class _LayerOfEarlier(tf.__internal__.tracking.Trackable):
    """The layer of one table, in checkpoints of earlier versions."""

    def __init__(self, table):
        self._table = table

    def _trackable_children(self, save_type="checkpoint", **kwargs):
        return {"_weight": self._table}


def deferred(own: Callable, self: Any, name: str, trackable: Any) -> None:
    """`Layer._handle_deferred_dependencies`: gives new tables what was restored before."""
    own(self, name, trackable)
    if isinstance(trackable, dict):
        trackable = list(trackable.values())
    held = trackable if isinstance(trackable, (list, tuple)) else [trackable]
    for table in filter(is_embedding_variable, held):
        (name,) = table_names.within(self.name, [unwrap(table).table_name])
        if name:
            own(self, _UNDER + name, table)


def check(objects: Sequence[Any], checkpoint: Any, path: str) -> None:
    """Warns of tables that a checkpoint lacks, or has beyond those of a layer.

    Args:
        objects: All objects that could be restored.
        checkpoint: TensorFlow's record of what was restored.
        path: The checkpoint's.
    """
    numbers = {id(thing): number for number, thing in checkpoint.object_by_proto_id.items()}
    layers = [each for each in objects if isinstance(each, tf.keras.layers.Layer)]
    reported = set()
    for layer in layers:
        named, number = _named(layer), numbers.get(id(layer))
        node = checkpoint.object_graph_proto.nodes[number] if number is not None else None
        known = [child.local_name for child in node.children] if node is not None else []
        received = [name.removeprefix(_UNDER) for name in known if name.startswith(_UNDER)]
        earlier = [name for name in known if _NUMBERED.fullmatch(name)]
        reported.update(id(unwrap(table)) for table in named.values())
        file = f"Checkpoint {path!r}"
        if named and not received and len(earlier) == len(named):
            if len(named) > 1:
                text = table_names.BY_PLACE.format(layer=layer.name, names=[*named])
                warnings.warn(text, stacklevel=2)
            continue
        lost = any(id(table) not in numbers for table in named.values())
        if received or lost:
            problem = table_names.matched(layer.name, [*named], received or earlier, file).problem
            if problem:
                warnings.warn(table_names.PARTIAL.format(problem=problem), stacklevel=2)
    tables = [each for each in objects if is_embedding_variable(each)]
    names = [t.table_name for t in tables if not {id(t), id(unwrap(t))} & ({*numbers} | reported)]
    if names:
        problem = f"Checkpoint {path!r} must hold the tables {names}. Received: one without them"
        warnings.warn(table_names.PARTIAL.format(problem=problem), stacklevel=2)
