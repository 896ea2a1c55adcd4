"""Exchanges between ranks, one after the other, in the order of the program on every rank.

    Turn -> keys =exchange=> check -> rows =exchange=> check -> Turn      a lookup forward
    Turn -> gradients =exchange=> check -> Turn                           and back

The first and the last op of a turn take a resource, the process's token. TensorFlow keeps ops on
one resource in the order in which a function, a branch or a loop's body makes them. So a lookup
that fails, which it does on all ranks, ends the step before any rank has begun the next lookup.

Because all ranks exchange in one order, the next exchange of one rank is met by the next one of
the others, whatever it is called. Each message says which call it is of (cpp/core/cpu/message.h):
where ranks are in different ones, all of them raise.

A `tf.compat.v1` graph runs what is fetched, in no order. There turns have numbers, by which
cpp/tf/session_order.cc puts those of one run in order, and exchanges meet by name. Turns in a loop,
a branch or a function of such a graph have no number; they meet by name, too.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import tensorflow as tf

from sok_like.runtime import devices, native, second_order, stalls
from sok_like.runtime.comm import IN_TURN, Communicator

_token: tf.Tensor | None = None
# As cpp/core/cpu/message.h has them: stages of a call, and the int64 words of a head.
_KEYS, _ROWS, _NOTES = 1, 2, 4
_HEAD = 8


@contextlib.contextmanager
def turn() -> Iterator[list[Any]]:
    """The scope of exchanges that no other exchange of this process may come between.

    Yields:
        A list for the tensors whose values end the turn.
    """
    done: list[Any] = []
    graph = _function_graph()
    if graph is None:
        with _numbered_turn():
            yield done
        return
    token, ops = _token_here(), native.ops()
    # TensorFlow orders no ops in the gradient of a function that it makes by itself.
    earlier = getattr(graph, "_sok_turn", None)
    with tf.control_dependencies([] if earlier is None else [earlier]):
        begin = ops.sok_turn(token=token)
    with tf.control_dependencies([begin]):
        yield done
    with tf.control_dependencies(done):
        graph._sok_turn = ops.sok_turn(token=token)


@contextlib.contextmanager
def _numbered_turn():
    """`turn` where a session runs the graph; nothing eagerly, and in a loop or branch of TF 1."""
    graph = None if tf.executing_eagerly() else tf.compat.v1.get_default_graph()
    if graph is None or graph._get_control_flow_context() is not None:
        yield
        return
    graph._sok_last_turn = getattr(graph, "_sok_last_turn", 0) + 1
    graph._sok_number = graph._sok_last_turn
    try:
        begin = native.ops().sok_turn(token=_token_here(), number=graph._sok_number)
        with tf.control_dependencies([begin]):
            yield
    finally:
        graph._sok_number = None


def _ends_numbered_turn(results):
    """Ops behind which a numbered turn has brought its results; without one, nothing."""
    graph = None if tf.executing_eagerly() else tf.compat.v1.get_default_graph()
    number = getattr(graph, "_sok_number", None)
    if number is None:
        return []
    with tf.control_dependencies(results):
        return [native.ops().sok_turn(token=_token_here(), number=number, ends=True)]


def in_turn(collective: Callable[[], Any], name: str, communicator: Communicator) -> Any:
    """What a collective of `communicator` returns: tensors that ranks make together, in a turn.

    In a graph the transport tells collectives apart by `name`. Eagerly it takes them as they come;
    there the ranks first tell each other which one they are in.

    Raises:
        tf.errors.FailedPreconditionError: eagerly, where ranks are in different calls; on all.
    """
    if tf.executing_eagerly() and communicator.world_size > 1:
        exchange_notes(tf.zeros([0], tf.int64), [], communicator, name)

    def run():
        # An absolute scope: what Keras numbers by itself ("functional_3") may differ over ranks.
        with tf.name_scope("sok_turn/"):
            return collective()

    with turn() as done:
        result = _waiting_for(name, [], run)
        tensors = [t for t in tf.nest.flatten(result, expand_composites=True) if t is not None]
        done += tensors
        ends = _ends_numbered_turn(tensors)
    return result if not ends else _behind(ends, result)


def exchange_keys(
    message: tf.Tensor,
    splits: tf.Tensor,
    communicator: Communicator,
    name: str,
    said: str | None = None,
    wire_dtype: str | None = None,
) -> tuple[tf.Tensor, tf.Tensor]:
    """`exchange` of the keys with which a call of the lookup `name` begins: an int64 message.

    The ranks must agree on `wire_dtype`, see `exchange_rows`, and on `said`, which is what errors
    call the lookup: by default its name.
    """
    return _first_exchange(message, splits, communicator, name, "keys", _KEYS, said, wire_dtype)


def exchange_notes(
    values: tf.Tensor, problems: Sequence[tf.Tensor], communicator: Communicator, name: str
) -> tuple[tf.Tensor, tf.Tensor]:
    """What every rank tells all ranks; in a turn of its own.

    Args:
        values: int64 `[num_values]`, as many as this rank likes.
        problems: Texts, empty but for what went wrong on this rank: raised on all ranks.
        name: What errors call it: the same on all ranks.

    Returns:
        int64, the ranks' values in rank order, and int32 `[world_size]`, how many each has sent.
    """
    ops, world_size = native.ops(), communicator.world_size
    message, splits = ops.sok_pack_note(
        values=values, problems=list(problems), world_size=world_size
    )
    with turn() as done:
        message, splits = _first_exchange(message, splits, communicator, name, "notes", _NOTES)
        done.append(message)
    return tuple(ops.sok_unpack_note(message=message, splits=splits, world_size=world_size))


def head_of_rows(name: str, wire_dtype: str | None = None) -> tf.Tensor:
    """float32 `[16]`: what begins each block of a message of rows of lookup `name`; in a turn."""
    words = native.ops().sok_stamp_call(
        message=tf.zeros([_HEAD], tf.int64),
        splits=[_HEAD],
        lookup=name,
        stage=_ROWS,
        wire_dtype=wire_dtype or tf.float32,
    )
    return tf.reshape(tf.bitcast(words, tf.float32), [-1])


def head_of_gradients(call: tf.Tensor) -> tf.Tensor:
    """float32 `[16]`, which begins each block of the gradients of rows of a call."""
    next_stage = tf.one_hot(1, _HEAD, tf.constant(1 << 56, tf.int64), tf.constant(0, tf.int64))
    return tf.reshape(tf.bitcast(call + next_stage, tf.float32), [-1])


def _first_exchange(message, splits, communicator, name, what, stage, said=None, wire_dtype=None):
    stamped = native.ops().sok_stamp_call(
        message=message,
        splits=splits,
        lookup=said or name,
        stage=stage,
        wire_dtype=wire_dtype or tf.float32,
    )
    message, splits, _ = exchange(stamped, splits, communicator, f"{name}_{what}")
    return message, splits


def exchange(
    message: tf.Tensor, splits: tf.Tensor, communicator: Communicator, name: str
) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
    """Sends each rank its block of a message; within a turn.

    All of it at once, or in rounds where the transport cannot count the words: the heads, which
    travel in the first, say how many there are.

    Args:
        message: int64 or float32, blocks that begin with a head.
        splits: int32 `[world_size]`, the blocks' lengths.
        name: Of the collective, in a v1 graph.

    Returns:
        The message received, its splits, and int64 `[8]`, the call that it is of: no gradient
        passes them.

    Raises:
        tf.errors.InvalidArgumentError, tf.errors.ResourceExhaustedError: what a rank told.
        tf.errors.FailedPreconditionError: the ranks are in different calls. Both on all ranks.
    """
    words = message.dtype.size // tf.float32.size
    # Under a tape TensorFlow would make the gradient of the loop below; callers know theirs.
    message = tf.stop_gradient(message)
    # All of one type, so that keys that meet gradients are told apart by us, by their names.
    carried = tf.reshape(tf.bitcast(message, tf.float32), [-1]) if words > 1 else message
    with tf.init_scope():
        ordered = tf.executing_eagerly()  # also where a function that is called so is being built

    def send(number):
        # A session's exchange is not met by one outside, whose name is another.
        what, collective = (name, IN_TURN) if ordered else (f"{name} (in a session)", name)
        with tf.name_scope(f"{name}_exchange"):
            return _send_round(carried, splits * words, number, communicator, what, collective)

    received, lengths = send(0)
    call, more = native.ops().sok_check_message(
        received, lengths, world_size=communicator.world_size
    )
    state = received, lengths, call
    if ordered and not tf.executing_eagerly() and not devices.gpu_in_use():
        # Not by calling the function: for that, Python would describe the devices each time.
        state = tf.raw_ops.StatefulPartitionedCall(
            args=[carried, splits * words, more, *state],
            Tout=[tensor.dtype for tensor in state],
            f=_rounds_function(communicator),
            config_proto=_not_rewritten(),
        )
    else:
        state = _further_rounds(send, more, *state)
    received, lengths, call = state
    with tf.control_dependencies([call, *_ends_numbered_turn([received, call])]):
        if words > 1:
            received = tf.bitcast(tf.reshape(received, [-1, words]), message.dtype)
        return tf.identity(received), lengths // words, call


def _send_round(carried, splits, number, communicator, what, collective):
    """The part of a message that travels in one round, as it is received, and its splits."""
    part, lengths = native.ops().sok_take_part(message=carried, splits=splits, round=number)
    return _waiting_for(what, [part], lambda: communicator.all_to_all(part, lengths, collective))


def _further_rounds(send, more, received, lengths, call):
    """What all rounds bring, its splits, and the call that it is of; `more` follow the first."""
    ops, world_size = native.ops(), lengths.shape[0]

    def next_round(number, received, lengths, _):
        received, lengths = ops.sok_join_parts(received, lengths, *send(number))
        checked = ops.sok_check_message(received, lengths, world_size=world_size)
        return number + 1, received, lengths, checked.call

    any_length = tf.TensorShape([None])
    return tf.while_loop(
        lambda number, *_: number <= more,
        next_round,
        (1, received, lengths, call),
        parallel_iterations=1,
        shape_invariants=(tf.TensorShape([]), any_length, lengths.shape, call.shape),
    )[1:]


def _rounds_function(communicator):
    """`_further_rounds` as one function for all exchanges of a communicator.

    A loop for each exchange made the first step of a model several times as long: TensorFlow
    optimizes and instantiates the two functions of each.
    """
    made = getattr(communicator, "_sok_rounds", None)
    if made is None:
        vector, scalar = tf.TensorSpec([None]), tf.TensorSpec([], tf.int32)
        splits = tf.TensorSpec([communicator.world_size], tf.int32)

        @tf.function(
            autograph=False,
            input_signature=[
                vector,
                splits,
                scalar,
                vector,
                splits,
                tf.TensorSpec([_HEAD], tf.int64),
            ],
            experimental_attributes={"_noinline": True},
        )
        def made(carried, splits, more, *state):
            def send(number):
                what = "further rounds of a long message"
                return _send_round(carried, splits, number, communicator, what, IN_TURN)

            return _further_rounds(send, more, *state)

        made = communicator._sok_rounds = made.get_concrete_function()
    return made


@functools.cache
def _not_rewritten():
    """Calls with it do not have the function optimized again, each for itself."""
    config = tf.compat.v1.ConfigProto()
    config.graph_options.rewrite_options.disable_meta_optimizer = True
    return config.SerializeToString()


def exchange_rows(
    rows: tf.Tensor,
    splits: tf.Tensor,
    communicator: Communicator,
    name: str,
    before_gradient: Callable[[Communicator], list[tf.Tensor]],
    wire_dtype: str | None = None,
) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
    """`exchange`, differentiable in `rows`: the gradient travels back in a turn of its own.

    It waits for what `before_gradient` returns, which is called where the gradient is taken. Both
    travel as `wire_dtype`, None for float32, which the heads of the message must say, too.
    """

    def exchange_floats(message, splits, name):
        if wire_dtype is None:
            return exchange(message, splits, communicator, name)
        narrow, narrow_splits = native.ops().sok_narrow_rows(message=message, splits=splits)
        received, lengths, call = exchange(narrow, narrow_splits, communicator, name)
        return *native.ops().sok_widen_rows(narrow=received, narrow_splits=lengths), call

    # Splits are arguments, too: in a v1 graph TensorFlow takes any variable that is found by going
    # back from what is captured for one that the function reads.
    @tf.custom_gradient
    def run(rows, splits):
        received, lengths, call = exchange_floats(rows, splits, name)

        @tf.custom_gradient
        def send_back(grad, lengths):
            with turn() as done:
                returned, _, returned_call = exchange_floats(grad, lengths, f"{name}_grad")
                done.append(returned_call)

            def refused(second):
                return second_order.refused([second], [grad])[0], None

            return returned, refused

        def back(grad, *_):
            with tf.control_dependencies(before_gradient(communicator)):
                return send_back(grad, lengths), None

        return (received, lengths, call), back

    return run(rows, splits)


def _waiting_for(what, inputs, collective):
    """What `collective` of `inputs` returns; until it is there, this process waits for `what`."""
    ops = native.ops()
    with tf.control_dependencies(inputs):
        wait = ops.sok_begin_wait(what=what)
    try:
        with tf.control_dependencies([wait]):
            result = collective()
    except tf.errors.OpError as error:
        ops.sok_end_wait(id=wait)
        stalls.raise_reason(error)
        raise
    tensors = [t for t in tf.nest.flatten(result, expand_composites=True) if t is not None]
    with tf.control_dependencies(tensors):
        end = ops.sok_end_wait(id=wait)
    if tf.executing_eagerly():
        return result
    return _behind([end, ops.sok_watch(id=wait)], result)


def _behind(ops, result):
    """The same tensors, there once the ops have run."""
    with tf.control_dependencies(ops):
        return tf.nest.map_structure(
            lambda t: None if t is None else tf.identity(t), result, expand_composites=True
        )


def _function_graph():
    """The graph being built of a function, a branch or a loop's body; None elsewhere."""
    if tf.executing_eagerly():
        return None
    graph = tf.compat.v1.get_default_graph()
    return graph if graph.building_function else None


def _token_here():
    """The token: one for a process, or one for each v1 graph."""
    token = _outermost_token()
    # The gradient of a loop's body takes no resource but those of the body.
    forward = getattr(tf.compat.v1.get_default_graph(), "_forward_graph", None)
    return token if forward is None else forward.capture(token)


def _outermost_token():
    global _token
    with tf.init_scope():
        if not tf.executing_eagerly():
            graph = tf.compat.v1.get_default_graph()
            if not hasattr(graph, "_sok_token"):
                graph._sok_token = _make_token()
            return graph._sok_token
        if _token is None:
            _token = _make_token()
        return _token


def _make_token():
    with tf.device("CPU:0"):
        return tf.raw_ops.VarHandleOp(dtype=tf.int64, shape=[], shared_name="sok_turns")
