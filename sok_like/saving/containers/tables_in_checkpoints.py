"""Tables in `tf.train.Checkpoint`: the names under which TensorFlow finds them, and their tensors.

    layer 'feat' -- tables/user --> table 'feat/user'
                 -- tables/item --> table 'feat/item'

TensorFlow finds an object by the attributes, positions and keys that lead to it from the root. For
a table these would be attributes that features number, or positions in a list. So a layer shows
TensorFlow its tables under their names within the layer (`table_names.py`), also those in its lists
and dictionaries. Tables without a name are where TensorFlow finds them.

    .../slot_names                   ends with the folder of a table that lies beside the checkpoint
    sok_like/ranks                   a note: the folder of variables that single ranks have
    sok_like/dense                   the same of dense tables, and whether slot variables are there
    sok_like/dense/<holder>/<table>  of one rank: a whole dense table, or a slot variable of it
"""

import dataclasses
import functools
import json
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import tensorflow as tf
from tensorflow.python.trackable import trackable_utils
from tensorflow.python.training.saving import saveable_object_util as saveable
from tensorflow.python.training.saving.saveable_object import SaveSpec

from sok_like.runtime.ranks import comm
from sok_like.runtime.ranks.agreement import agreed
from sok_like.saving import transaction
from sok_like.saving.containers import keras_layers
from sok_like.saving.format import array_files
from sok_like.saving.parts import dense_tables, table_names
from sok_like.saving.parts.checkpointable import CheckpointPart, RankLocalVariables
from sok_like.saving.parts.hash_tables import HashTablePart
from sok_like.table import snapshots
from sok_like.table.slices import TableSlice
from sok_like.table.variable import is_embedding_variable, unwrap

_UNDER = "tables/"
_OF_DENSE = "sok_like/dense"


# ---- names ----


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


# ---- tensors ----


def tensors_of(saver: Any) -> list[Any]:
    """The tensors of a saver, as TensorFlow describes them."""
    return [tensor for shards in saver._shardable_tensors_by_task.values() for tensor in shards]


def object_of(tensor: Any) -> Any:
    """The object of a tensor, without the adapters that a restore puts around it."""
    thing = tensor.trackable
    while isinstance(thing, (saveable.SaveableCompatibilityConverter, saveable.TrackableSaveable)):
        is_object = isinstance(thing, saveable.TrackableSaveable)
        thing = thing._trackable if is_object else thing.obj
    return thing


def parts_besides_tables(
    saver: Any, kinds: RankLocalVariables, call: str
) -> Iterator[CheckpointPart]:
    """What several ranks write of a saver's objects besides hash tables; asks other ranks."""

    def values():
        own = {id(variable) for variable in kinds.own}
        for tensor in tensors_of(saver):
            if id(object_of(tensor)) in own:
                value, spec = tensor.tensor, tensor._tensor_save_spec
                yield tensor.checkpoint_key, spec.tensor if value is None else value

    if kinds.own:
        yield dense_tables.rank_variables(values)
    if kinds.holders:
        ids = agreed(lambda: [holder.id for holder in kinds.holders], comm.current(), call)[0]
        yield dense_tables.dense_tables("dense", kinds.holders, ids)


def refer(saver: Any, kinds: RankLocalVariables, part: CheckpointPart, reference: str) -> None:
    """Puts the name of a part's folder into the checkpoint."""
    if isinstance(part, HashTablePart):
        for tensor in tensors_of(saver):
            name = trackable_utils.extract_local_name(tensor.checkpoint_key)
            if unwrap(object_of(tensor)) is part.table and name == "slot_names":
                _put(saver, tensor.checkpoint_key, [snapshots.BESIDE + reference])
        return
    fields = {"folder": reference, "world_size": comm.current().world_size}
    if part.name == "dense":
        fields["slots"] = _have_slots(kinds.holders)
    _put(saver, f"sok_like/{part.name}", json.dumps(fields))


def put_inside(saver: Any, holders: list[Any]) -> None:
    """On one rank: puts whole dense tables into the checkpoint."""
    for holder in holders:
        for key, value in dense_tables.wholes_of(holder):
            _put(saver, f"{_OF_DENSE}/{holder.id}/{key}", value)
    if holders:
        _put(saver, _OF_DENSE, json.dumps({"folder": None, "slots": _have_slots(holders)}))


def _have_slots(holders):
    return any("." in part.key for holder in holders for part in dense_tables.parts_of(holder))


def _put(saver, key, value):
    """Writes a tensor under a key, in place of the one that an object may have there."""
    shards = next(iter(saver._shardable_tensors_by_task.values()))
    like, tensor = shards[0], tf.convert_to_tensor(value)
    for of_task in saver._shardable_tensors_by_task.values():
        of_task[:] = [shard for shard in of_task if shard.checkpoint_key != key]
    spec = SaveSpec(tensor, "", key, dtype=tensor.dtype, device=tensor.device)
    fields = {"tensor": tensor, "dtype": tensor.dtype, "name": key, "checkpoint_key": key}
    fields |= {"_tensor_save_spec": spec, "slice_spec": "", "trackable": None}
    shards.append(dataclasses.replace(like, **fields))


def note(path: str, part: str) -> dict[str, Any]:
    """A checkpoint's note on the part "ranks" or "dense"; empty if it has none."""
    reader, key = tf.train.load_checkpoint(path), f"sok_like/{part}"
    return json.loads(reader.get_tensor(key)) if reader.has_tensor(key) else {}


def values_of_rank(path: str, ranks: int) -> dict[str, Any]:
    """By key: the values that only this rank has."""
    of_ranks = note(path, "ranks")
    if of_ranks.get("world_size") != ranks:
        writers = f"{of_ranks['world_size']} ranks" if of_ranks else "one rank"
        raise ValueError(
            "A checkpoint with variables that differ between ranks must be restored on the number "
            "of ranks that wrote it; sok2.dump and sok2.load also work with another number. "
            f"Received: {path!r} of {writers}, on {ranks} ranks"
        )
    rank, folder = comm.current().rank, transaction.folder_read(of_ranks["folder"])
    files = array_files.Folder(folder, ranks)
    files.check([rank])
    with files.open(rank) as archive:
        return {key: archive[key] for key in archive.files}


def stored_dense_tables(path: str) -> dict[str, dense_tables.StoredTables]:
    """The dense tables of a checkpoint, by their holder's id."""
    of_dense = note(path, "dense")
    if of_dense.get("folder") is not None:
        folder = transaction.folder_read(of_dense["folder"])
        return dense_tables.read_folder(folder, of_dense["world_size"])
    reader = tf.train.load_checkpoint(path)
    slices: dict[str, dict[str, tuple]] = {}
    for name, shape in reader.get_variable_to_shape_map().items():
        if name.startswith(f"{_OF_DENSE}/"):
            holder, key = name.removeprefix(f"{_OF_DENSE}/").split("/")
            read = functools.partial(reader.get_tensor, name)
            place = TableSlice((0, 0), tuple(shape))
            slices.setdefault(holder, {})[key] = shape, place, read
    return {holder: dense_tables.StoredTables.of_slices(whole) for holder, whole in slices.items()}
