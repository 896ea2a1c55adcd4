"""`sok.export_saved_model`: a model as a SavedModel that loads without this package.

    every rank   agree on the call | write hash tables |              | write other tables |
    rank 0                                             | trace, check |                    | merge

The model's functions are traced again in a scope in which every lookup uses stock ops on plain
variables (`sok_like/lookup/exporting.py`). So padding, combiners, weights and inputs of all kinds
work as in the layers. The traced graph is then searched for ops that stock TensorFlow does not
have.
"""

import functools
import os
import types
from typing import Any

import tensorflow as tf
from tensorflow.python.saved_model import save_context

from sok_like.lookup.exporting import Exporting
from sok_like.lookup.stock_table import ROW_DTYPES
from sok_like.runtime.checks import require, wrong_argument
from sok_like.runtime.ranks import comm
from sok_like.runtime.ranks.agreement import agreed, all_or_none, check_same
from sok_like.saving.containers import checkpoints
from sok_like.saving.format import durable
from sok_like.serving import signatures as signature
from sok_like.serving import tables
from sok_like.serving.delta import Followed, followed_exports
from sok_like.serving.parts import Parts, SpreadVariables, is_spread, variables_of
from sok_like.serving.refresh import ServedState
from sok_like.table.variable import EmbeddingVariable

MISSING = ("initial", "zeros")
REFRESH = "refresh"  # the signature
HEADROOM = 0.25

# Ops of stock TensorFlow that call into this process.
_PYTHON_OPS = {"PyFunc", "PyFuncStateless", "EagerPyFunc"}


def export_saved_model(
    model: Any,
    path: str | os.PathLike,
    missing: str = "initial",
    row_dtype: str = "float32",
    signatures: Any = None,
    refreshable: bool | str | os.PathLike = False,
    headroom: float = HEADROOM,
) -> None:
    """Writes a SavedModel that TensorFlow 2 and TensorFlow Serving load without this package.

    Every rank must call this, with the same arguments. Each writes a part of the tables; a rank
    that does not see rank 0's file system sends its part there. The SavedModel computes what the
    model does with `training=False`, with the same bits if `row_dtype` is "float32" and `missing`
    is "initial", as they are by default.

    Args:
        model: A Keras model or layer that has been called once, or a tf.Module.
        path: Folder of the SavedModel, on any file system that TensorFlow writes (`gs://...`). An
            existing SavedModel is replaced when the new one is complete.
        missing: What a key without a row reads: "initial", the row that training would give it, as
            in `predict`; or "zeros".
        row_dtype: Of rows of hash tables: "float32", "bfloat16", or "int8" with one scale per row.
            Dense tables keep their dtype.
        signatures: What to export; it is called "serving_default" unless it has names:
            None: a Keras model with `inputs`, or the tf.functions of a tf.Module that have an
            `input_signature`, `__call__` as "serving_default";
            the inputs of the model, as specs or as tensors whose first axis is the batch, in the
            structure with which the model is called;
            a dictionary from names to tf.functions that have an `input_signature`.
        refreshable: True or a folder: the SavedModel has a signature `refresh`, by which it follows
            the training, see `sok.export_delta`. It finds deltas in this folder, as the server sees
            it; True is `path` with `.deltas` appended, which an export empties. Tables must be in
            host memory. They record changes then, at 4 bytes per row and 8 per key changed, and the
            ranks together keep 15 bytes for each key that there is room for.
        headroom: With `refreshable`, room for new keys as a fraction of the keys, beside 1,024 per
            table.

    A signature takes and returns tensors by name; docs/serving.md says which names they have.

    Raises:
        ValueError: an argument is out of range, or a part of the model cannot be exported; names
            it. On all ranks.
        TypeError: `model` has another type.
        RuntimeError: TensorFlow is not executing eagerly.
    """
    communicator = comm.current()
    path = os.fspath(path)
    _check_arguments(model, missing, row_dtype, refreshable, headroom)
    functions = all_or_none(lambda: signature.find(model, signatures), communicator)
    variables = variables_of(model)
    held = [variable for variable in variables if isinstance(variable, EmbeddingVariable)]
    if not held and row_dtype != "float32":
        raise wrong_argument("row_dtype", "'float32' for a model without hash tables", row_dtype)
    names = [table.table_name for table in held]
    deltas = ""  # the folder that `refresh` reads
    if refreshable is True:
        deltas = _beside(path)
    elif refreshable:
        deltas = os.fspath(refreshable).rstrip("/") or "/"
    text = f"{path} missing={missing} row_dtype={row_dtype} {sorted(functions)} tables={names}"
    text += f" refreshable={refreshable} headroom={headroom}" if deltas else ""
    required = "Every rank must call sok.export_saved_model with the same arguments and tables"
    check_same(agreed(lambda: text, communicator, raises=ValueError), required, ValueError)
    spread = SpreadVariables(model, variables)
    all_or_none(None if communicator.rank else lambda: _check_path(path), communicator)
    with Parts(path, "sok.export_saved_model") as parts:
        room = headroom if deltas else None
        stock, served = tables.write(held, parts, row_dtype, missing, room)
        module = tf.Module()
        for part, variable in stock.large.items():
            setattr(module, tables.attribute_of(part), variable)
        module.tables = [_About(table) for table in stock.tables]
        followed = Followed(stock, served)
        stands_for = {id(table.variable): table.stock for table in served}
        traced: dict[str, Any] = {}
        with spread.replaced() as (of_holders, replacements):

            def trace():
                if communicator.rank != 0:
                    return None
                what = Exporting(stock, stands_for, of_holders)
                traced.update({name: _traced(call, what) for name, call in functions.items()})
                used = _hold(model, module, traced, replacements)
                if deltas:
                    traced.update(_refreshable(traced, module, followed, deltas, used))
                for name, function in traced.items():
                    _check_ops(function.graph, name)
                return list(used)

            # Others, such as an optimizer's slot variables, are not part of the SavedModel.
            used = agreed(trace, communicator, raises=ValueError)[0]
            followed.spread = spread, used
            parts.write_rows(spread.rows(parts, used))
            write = functools.partial(_write, path, module, traced, parts, deltas)
            all_or_none(None if communicator.rank else write, communicator)
    if deltas:
        followed_exports[model] = followed


class _About(tf.Module):
    """A table of the SavedModel: where it is in the variables of all of them."""

    def __init__(self, table):
        super().__init__(name="table")
        with tf.device("/CPU:0"):
            self.about = tf.Variable(table.about(), trainable=False, name="about")


def _beside(path):
    path = path.rstrip("/") if durable.local(path) is None else os.path.abspath(path)
    return f"{path}.deltas"


def _check_arguments(model, missing, row_dtype, refreshable, headroom):
    if not tf.executing_eagerly():
        raise RuntimeError("sok.export_saved_model must be called eagerly, not in a graph.")
    if not isinstance(model, tf.Module | tf.keras.layers.Layer):
        required = "a Keras model, a Keras layer or a tf.Module"
        raise wrong_argument("model", required, model, error=TypeError)
    require(missing in MISSING, "missing", f"one of {MISSING}", missing)
    require(row_dtype in ROW_DTYPES, "row_dtype", f"one of {ROW_DTYPES}", row_dtype)
    is_legal = isinstance(headroom, (int, float)) and 0 <= headroom < float("inf")
    require(is_legal, "headroom", "a number >= 0", headroom)
    is_used = bool(refreshable) or headroom == HEADROOM
    require(is_used, "headroom", "given with `refreshable` only", headroom)
    is_folder = not refreshable or isinstance(refreshable, (bool, str, os.PathLike))
    require(is_folder, "refreshable", "True, False or a folder", refreshable)
    is_built = not isinstance(model, tf.keras.layers.Layer) or model.built
    require(is_built, "model", "built: call it once", model)


def _hold(model, module, concrete, replacements):
    """Lets `module` have what the functions of the model use; returns the replacements used."""
    read = {id(v): v for function in concrete.values() for v in function.graph.variables}
    used = {name: v for name, v in replacements.items() if id(v) in read}
    for name, variable in used.items():
        setattr(module, name, variable)  # no path is shorter, so it is the name in the checkpoint
    # The replacements of spread variables are among these and the tables.
    module.captured = [v for v in read.values() if not is_spread(v)]
    module.resources = [
        item
        for item in tf.train.TrackableView(model).descendants()
        if isinstance(item, tf.saved_model.experimental.TrackableResource)
    ]
    return used


def _write(path, module, concrete, parts, deltas):
    aside = durable.join(parts.folder, "model")
    try:
        with checkpoints.by_one_rank():
            tf.saved_model.save(module, aside, signatures=concrete)
        folder = durable.join(aside, "variables")
        if parts:
            for name in durable.names(folder):
                tf.io.gfile.rename(durable.join(folder, name), durable.join(parts.folder, name))
            parts.merge(durable.join(folder, "variables"), durable.join(parts.folder, "variables"))
        _move(aside, path)
        if deltas == _beside(path):
            durable.remove_folder(deltas)  # they belong to the SavedModel that was replaced
    except AssertionError as error:  # a resource that the module does not hold
        raise ValueError(
            f"`model` uses a resource that none of its attributes holds, so it cannot be exported: "
            f"{error}"
        ) from error


def _refreshable(concrete, module, followed, folder, spread):
    """The same functions with answers of one version, and `refresh`."""
    if REFRESH in concrete:
        raise ValueError(
            f"No signature of `model` may be called '{REFRESH}' if it is refreshable. "
            f"Received: {sorted(concrete)}"
        )
    state = module.served = ServedState(followed.version)
    of_tables = {id(v) for v in (*followed.stock.large.values(), *followed.stock.small())}
    dense = [v for v in module.captured if id(v) not in of_tables]
    refresh = state.refresh(folder, followed.updates(dense, spread)).get_concrete_function()
    served = {REFRESH: refresh}
    for name, function in concrete.items():
        _, specs = function.structured_input_signature
        of_one_version = tf.function(state.of_one_version(function), autograph=False)
        served[name] = of_one_version.get_concrete_function(**specs)
    return served


def _traced(function, what):
    call, specs = signature.flat_function(function)
    # TensorFlow must trace the tf.functions within a model again: earlier traces have this
    # package's ops, or tables of another export. It keeps one trace per policy of a SavedModel's
    # variables, and this policy is equal to no other.
    options = types.SimpleNamespace(experimental_variable_policy=object())

    def traced(**tensors):
        with what.in_progress() as results, save_context.save_context(options):
            results.append(call(**tensors))
            return results[0]

    by_name = {spec.name: spec for spec in specs}
    return tf.function(traced, autograph=False).get_concrete_function(**by_name)


def _check_ops(graph, name):
    """ValueError if the graph, or a function that it calls, has an op that TensorFlow lacks."""
    places = [(node.name, node.op) for node in graph.as_graph_def().node]
    for function in graph.as_graph_def().library.function:
        places += [(f"{function.signature.name}/{n.name}", n.op) for n in function.node_def]
    for place, op in places:
        if op in _PYTHON_OPS or not (op.startswith("_") or hasattr(tf.raw_ops, op)):
            raise ValueError(
                f"Signature '{name}' of `model` has the op {op}, at '{place}', which no process "
                "without this one's Python or libraries can run, so it cannot be exported."
            )


def _check_path(path):
    if not durable.exists(path):  # raises if there is no file system for the path
        return
    names = durable.names(path)
    is_free = durable.is_folder(path) and (not names or "saved_model.pb" in names)
    required = "a new folder, an empty one or a SavedModel to be replaced"
    require(is_free, "path", required, path)


def _move(aside, path):
    """Puts the complete SavedModel in its place, so that nobody reads an incomplete one."""
    put = _copy if durable.local(path) is None else _rename
    try:
        put(aside, path)
    except BaseException:
        # The earlier one may have left its place.
        if not durable.exists(durable.join(path, "saved_model.pb")):
            put(aside, path)
        raise


def _rename(aside, path):
    if tf.io.gfile.exists(path):
        tf.io.gfile.rename(path, f"{aside}.old")  # is removed with its folder
    tf.io.gfile.rename(aside, path)


def _copy(aside, path):
    """`_rename` for file systems that may not rename folders; `saved_model.pb` makes it a model."""
    last = durable.join(aside, "saved_model.pb")
    durable.remove(durable.join(path, "saved_model.pb"))  # from now on nobody reads a mixture
    durable.remove_folder(path)
    for file in sorted(durable.files_below(aside), key=lambda file: file == last):
        target = path + file.removeprefix(aside)
        durable.make_folder(os.path.dirname(target))
        tf.io.gfile.copy(file, target)
