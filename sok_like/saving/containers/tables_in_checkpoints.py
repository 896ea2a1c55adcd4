"""The tables of a layer in `tf.train.Checkpoint`: children of the layer by their names.

    layer 'feat' -- tables/user --> table 'feat/user'
                 -- tables/item --> table 'feat/item'

TensorFlow finds an object by the attributes, positions and keys that lead to it from the root. For
a table these would be attributes that features number, or positions in a list. So a layer shows
TensorFlow its tables under their names within the layer (`table_names.py`), also those in its lists
and dictionaries. Tables without a name are where TensorFlow finds them.
"""

import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import tensorflow as tf

from sok_like.saving.containers import keras_layers
from sok_like.saving.parts import table_names
from sok_like.saving.parts.checkpointable import RankLocalVariables
from sok_like.table.variable import is_embedding_variable, unwrap

_UNDER = "tables/"


def _named(layer):
    """A layer's tables that have a name within it."""
    tables = keras_layers.tables_of(layer)
    names = table_names.within(layer.name, [table.table_name for table in tables])
    return {name: table.as_weight() for name, table in zip(names, tables, strict=True) if name}


def children(own: Callable, self: Any, save_type: str = "checkpoint", **kwargs: Any) -> Any:
    """`Layer._trackable_children`."""
    children = own(self, save_type, **kwargs)
    if save_type != "checkpoint":
        return children
    is_model = "_operations" in children
    if is_model and (RankLocalVariables(self.variables).tables or keras_layers.holders_of(self)):
        # Of a Keras 3 model, TensorFlow numbers inputs and layers in one list, so one more feature
        # would change the number of each layer. This is how tf_keras numbers them.
        layers = [layer for layer in self.layers if layer.weights]
        numbered = {f"layer_with_weights-{n}": layer for n, layer in enumerate(layers)}
        children = {**children, **numbered}
    named = _named(self)
    if not named:
        return children
    tables = {id(unwrap(table)) for table in named.values()}
    others = {name: child for name, child in children.items() if not _are(child, tables)}
    return {**others, **{_UNDER + name: table for name, table in named.items()}}


def by_name(children: Mapping[str, Any]) -> dict[str, Any]:
    """The tables among a layer's children that have a name."""
    return {name: child for name, child in children.items() if name.startswith(_UNDER)}


def _are(child, tables):
    """Whether a child is one of the tables, or a container of nothing else."""
    if is_embedding_variable(child):
        return id(unwrap(child)) in tables
    items = child._trackable_children() if isinstance(child, (list, dict, tuple)) else {}
    return bool(items) and all(_are(item, tables) for item in items.values())


def look_up(own: Callable, self: Any, name: str, cached_dependencies: Any = None) -> Any:
    """`Layer._lookup_dependency`: the child with this name in a checkpoint."""
    if name.startswith(_UNDER):
        (name,) = table_names.renamed(self.name, [name.removeprefix(_UNDER)])
        return _named(self).get(name)
    return own(self, name, cached_dependencies)


def deferred(own: Callable, self: Any, name: str, trackable: Any) -> None:
    """`Layer._handle_deferred_dependencies`: gives new tables what was restored before."""
    own(self, name, trackable)
    if isinstance(trackable, dict):
        trackable = list(trackable.values())
    items = trackable if isinstance(trackable, (list, tuple)) else [trackable]
    for table in filter(is_embedding_variable, items):
        (name,) = table_names.within(self.name, [unwrap(table).table_name])
        if name:
            own(self, _UNDER + name, table)


def check(objects: Sequence[Any], status: Any, path: str, problems: list[str]) -> None:
    """Warns of tables that a checkpoint lacks, or has beyond those of a layer."""
    # Whether that is right, a program says after the restore only, by `assert_consumed` and the
    # like of `status`, which then raise. `objects` are all that could be restored.
    checkpoint, file = status._checkpoint, f"Checkpoint {path!r}"
    stored: dict[int, list[str]] = {}  # by object: the names of its children in the checkpoint
    for number, thing in checkpoint.object_by_proto_id.items():
        nodes = checkpoint.object_graph_proto.nodes[number].children
        stored.setdefault(id(unwrap(thing)), []).extend(child.local_name for child in nodes)
    tables = RankLocalVariables(objects).tables
    lost = {id(table): table.table_name for table in tables if id(table) not in stored}
    for layer in [thing for thing in objects if isinstance(thing, tf.keras.layers.Layer)]:
        named, names = _named(layer), stored.get(id(layer), [])
        received = [name.removeprefix(_UNDER) for name in names if name.startswith(_UNDER)]
        missing = [lost.pop(id(unwrap(table)), None) for table in named.values()]
        if received or any(missing):
            problems.append(table_names.matched(layer.name, [*named], received, file)[1])
    if lost:
        problems.append(f"{file} must hold the tables {[*lost.values()]}. Received: none of them")
    problems = [table_names.PARTIAL.format(problem=text) for text in problems if text]
    for problem in problems:
        warnings.warn(problem, stacklevel=4)

    def raise_():
        raise AssertionError("; ".join(problems))

    if problems:
        status.assert_consumed = status.assert_existing_objects_matched = raise_
