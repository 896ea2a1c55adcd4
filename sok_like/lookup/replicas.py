"""Variables that every rank holds: broadcast from one rank, and compared while tables are trained.

A table's gradient is a collective. The tape that asks for it names the ordinary variables that are
trained beside the table. Optimizers of this package average their gradients over ranks; the program
may do so, too. If nothing does, each rank trains different weights, and none would notice. So at a
few steps the ranks compare two sums of each of these variables, whoever trains them.

    step       1   2   3   4   ..   8   ..   16   ..
    compared       x   x   x        x        x          before the step is taken

Not at step 1: some programs broadcast variables after it. They also compare what layers of the
model assign and nothing averages, as moving means of their own. In a step of `fit` they compare
what layers have learned from data by `adapt`, too: a vocabulary, means, boundaries. Few of these
are variables, and a rank may have seen other data.
"""

import functools
import hashlib
import threading
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from sok_like.lookup import keras_call
from sok_like.lookup.dense_lookup import as_tf_table
from sok_like.lookup.local_variables import is_local, unique_in_graph
from sok_like.runtime.framework import hooks, running_keras
from sok_like.runtime.framework.graphs import counter
from sok_like.runtime.framework.running_keras import is_keras_3
from sok_like.runtime.framework.scoped_attributes import attributes
from sok_like.runtime.native import libraries
from sok_like.runtime.ranks import comm, exchange_order
from sok_like.runtime.ranks.agreement import agreed

# Relative, for these sums: hosts with different processors may differ in the last bits.
TOLERANCE = 1e-5
# Attribute of a layer whose statistics are averaged over ranks with the gradients.
AVERAGED = "_sok_averaged"
# Attributes in which Keras' layers keep what `adapt` has learned, beside `lookup_table`.
_LEARNED = ("mean", "variance", "bin_boundaries", "idf_weights_const")


_asked = threading.local()  # `call`: the innermost `GradientTape.gradient` in progress


def with_optimizer(variables: Iterable[Any], optimizer: Any) -> list[Any]:
    """A model's variables and its optimizer's, each once."""
    variables = list(variables)
    ids = {id(variable) for variable in variables}
    own = optimizer.variables
    own = own() if callable(own) else own
    return variables + [variable for variable in own if id(variable) not in ids]


def broadcast(variables: Iterable[Any], root_rank: int, name: str) -> list[Any]:
    """Gives all ranks one rank's values of variables that are not local; a graph must run it."""
    communicator = comm.current()
    if communicator.world_size == 1:
        return []
    name = unique_in_graph(name)
    shared = [variable for variable in variables if not is_local(variable)]
    assignments = []
    for i, variable in enumerate(shared):
        value, turn = tf.convert_to_tensor(as_tf_table(variable)), f"{name}_{i}"
        in_turn = exchange_order.collective_in_turn
        value = in_turn(communicator, "broadcast", value, turn, root_rank)
        assignments.append(variable.assign(value))
    return assignments


def check_same_shapes(variables: Sequence[Any]) -> None:
    """ValueError on all ranks unless all list variables of equal shapes and dtypes. Eager only."""
    texts = [f"{v.dtype} {tuple(v.shape)}" for v in variables]
    lists = agreed(lambda: texts, comm.current(), "a broadcast of variables")
    if all(other == lists[0] for other in lists):
        return
    differing = (i for i, same in enumerate(zip(*lists, strict=False)) if len(set(same)) > 1)
    first = next(differing, min(map(len, lists)))
    here = "missing"
    if first < len(texts):
        here = f"'{_path(variables[first])}', {texts[first]}"
    raise ValueError(
        "The ranks must have the same variables in the same order. Received: "
        f"{[len(other) for other in lists]} variables, by rank; the first that differs is number "
        f"{first}, which on rank {comm.current().rank} is {here}"
    )


def compare(model: Any, communicator: comm.Communicator) -> list[tf.Tensor]:
    """Compares variables of the tape that takes a gradient, and of a model, if it is time."""
    # Called where the gradient of a lookup is built. Without a tape around it (`tf.gradients`) and
    # in a v1 graph it compares nothing. Returns tensors that later ops must wait for.
    model = running_keras.model() or model
    call = getattr(_asked, "call", None)
    if call is None or not tf.compat.v1.executing_eagerly_outside_functions():
        return []
    tape, target, sources = call
    if getattr(tape, "_sok_compared", False):  # at its first lookup
        return []
    if not tf.executing_eagerly():
        # The gradient of a loop or branch can use only variables that its body uses.
        graph = tf.compat.v1.get_default_graph()
        targets = tf.nest.flatten(target, expand_composites=True)
        if any(getattr(target, "graph", None) is not graph for target in targets):
            return []
    variables = list(filter(_is_ordinary, tf.nest.flatten(sources)))
    # If the program asks for tables only: all that the tape watches.
    variables = variables or list(filter(_is_ordinary, tape.watched_variables()))
    tape._sok_compared = bool(variables) or model is not None
    return compare_at_times(variables, model, communicator) if tape._sok_compared else []


def compare_at_times(
    variables: list[Any], model: Any, communicator: comm.Communicator
) -> list[tf.Tensor]:
    """Counts a step; compares these variables and the untrained of a model, if it is time."""
    # Of gradients taken beside a table, counted at their first variable or at the model.
    owner = as_tf_table(variables[0]) if variables else model
    step = tf.identity(counter(owner, "gradients_taken").assign_add(1, read_value=True))
    is_power = tf.equal(tf.bitwise.bitwise_and(step, step - 1), 0)
    due = (step > 1) & (is_power | tf.equal(step, 3))

    def exchange():
        compared, names = with_untrained(variables, model)
        learners = list(filter(_learns, _layers(running_keras.model())))
        names += [f"layer '{layer.name}', adapted to other data," for layer in learners]
        if not names:
            return tf.constant(True)
        sums = tf.cast(tf.bitcast(sums_of(compared, learners), tf.int32), tf.int64)
        name = f"comparison_of_{len(names)}_ordinary_variables"
        notes, _ = exchange_order.exchange_notes(sums, communicator, name)
        by_rank = tf.reshape(notes, [communicator.world_size, 2 * len(names)])
        by_rank = tf.bitcast(tf.cast(by_rank, tf.int32), tf.float32)
        # Learning rates and steps, which come first, matter to optimizers only.
        with tf.control_dependencies(check(tf.pad(by_rank, [[0, 0], [2, 0]]), names)):
            return tf.constant(True)

    return [tf.cond(due, exchange, lambda: tf.constant(True))]


def sums_of(variables: Sequence[Any], learners: Sequence[Any] = ()) -> tf.Tensor:
    """Two sums for each: one depends on the order of elements, one is of absolutes; `[2 n]`."""

    def sums(*values):
        pairs = []
        for array in (*values, *map(_learned, learners)):
            flat = np.asarray(array).astype(np.float64).ravel()
            pairs += [flat @ np.cos(np.arange(1, flat.size + 1)), np.abs(flat).sum()]
        return np.array(pairs, np.float32)

    # One op for all variables: TensorFlow's own ops would be ten per variable to trace.
    values = tf.numpy_function(sums, list(map(as_tf_table, variables)), tf.float32)
    return tf.ensure_shape(values, [2 * (len(variables) + len(learners))])


def _learned(layer):
    """What the layer has learned by `adapt`, as numbers; of a vocabulary a digest."""
    values = (getattr(layer, name, None) for name in _LEARNED)
    numbers = [np.ravel(value) for value in values if value is not None]
    if (vocabulary := getattr(layer, "lookup_table", None)) is not None:
        tokens, places = vocabulary.export()
        in_order = tf.io.serialize_tensor(tf.gather(tokens, tf.argsort(places))).numpy()
        digest = hashlib.blake2b(in_order, digest_size=8).digest()
        numbers.append(np.frombuffer(digest, np.uint32) / 2**32)
    return np.concatenate([np.zeros(1), *numbers])


def check(statements: Any, names: Sequence[str]) -> list:
    """Raises unless all ranks' statements `[world_size, ...]` agree; in a graph returns the op."""
    with tf.device("CPU:0"):  # the op's only device, even if gradients are averaged on another
        op = libraries.ops().sok_compare_statements(
            statements=statements, compared=names, tolerance=TOLERANCE
        )
    return [] if op is None else [op]


def with_untrained(variables: Sequence[Any], model: Any) -> tuple[list[Any], list[str]]:
    """These and a model's untrained floating variables, with the names of all in errors."""
    untrained = {}
    for layer in _layers(model):
        if _is_apart(layer):
            continue
        own = layer._non_trainable_variables if is_keras_3() else layer._non_trainable_weights
        plain = [v for v in vars(layer).values() if isinstance(v, tf.Variable) and not v.trainable]
        for variable in (*own, *plain):
            if tf.as_dtype(variable.dtype).is_floating and _is_shared(variable):
                untrained[id(variable)] = variable, layer.name
    names = [f"variable '{_path(variable)}'" for variable in variables]
    names += [
        f"variable '{_path(variable)}' of layer '{layer}', which no gradient trains (average over "
        "ranks what the layer assigns to it; if ranks may differ in it, set `de_local = True` on "
        "it),"
        for variable, layer in untrained.values()
    ]
    return [*variables, *(variable for variable, _ in untrained.values())], names


def _path(variable):
    return getattr(variable, "path", variable.name)


def _is_apart(layer):
    """Whether a layer may hold what differs over ranks, or others keep its variables alike."""
    if isinstance(layer, tf.keras.Model):  # perhaps sums of gradients
        stock = tf.keras.Model.train_step
        return running_keras.model() is None or type(layer).train_step is not stock
    # States of samples, a metric's of batches, and those of layers of this package.
    holds_states = getattr(layer, "stateful", False) or isinstance(layer, tf.keras.metrics.Metric)
    is_ours = type(layer).__module__.startswith("sok_like.")
    return holds_states or is_ours or _learns(layer) or hasattr(layer, AVERAGED)


def _layers(model):
    return [] if model is None else model._flatten_layers()


def _learns(layer):
    return {"adapt", "finalize_state"} <= {*dir(layer)}


def _is_ordinary(source):
    # Trained variables of a distribution follow its own rules.
    return _is_shared(source) and getattr(source, "_sok_distribution", None) is None


def _is_shared(source):
    is_variable = isinstance(getattr(source, "_value", source), tf.Variable)
    return is_variable and not is_local(source)


def comparison() -> Callable[[comm.Communicator], list[tf.Tensor]]:
    """`compare`, for a lookup on several ranks, whose tape it must know; others wrap nothing."""
    hooks.at_init(_watch_tapes)
    layers = list(keras_call.layers_of_call())
    return functools.partial(compare, layers[-1] if layers else None)


def _gradient(own, self, target, sources, *args, **kwargs):
    with attributes(_asked, {"call": (self, target, sources)}):
        return own(self, target, sources, *args, **kwargs)


def _watch_tapes():
    why = "variables trained beside a table are compared"
    hooks.wrap(tf.GradientTape, "gradient", _gradient, why)
