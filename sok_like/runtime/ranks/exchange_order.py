"""Exchanges between ranks, one after the other, in the order of the program on every rank.

    Turn -> keys =exchange=> check -> rows =exchange=> check -> Turn      a lookup forward
    Turn -> gradients =exchange=> check -> Turn                           and back

The first and the last op of a turn take a resource, the process's token. TensorFlow runs ops on one
resource in the order in which a function, a branch or a loop body creates them. A lookup that fails
does so on all ranks, so it ends the step before any rank has begun the next lookup.

All ranks exchange in one order, so the next exchange of one rank meets the next one of the others,
whatever its name. Each message says which call it belongs to (cpp/core/cpu/message.h). If ranks are
in different calls, all of them raise.

A `tf.compat.v1` graph runs what is fetched, in no fixed order. There turns have numbers, by which
cpp/tf/session_order.cc sorts those of one run, and exchanges meet by name. Turns in a loop, a
branch or a function of such a graph have no number. They meet by name, too.
"""

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import tensorflow as tf

from sok_like.runtime.framework import graphs
from sok_like.runtime.native import devices, libraries
from sok_like.runtime.ranks import comm, stalls
from sok_like.runtime.ranks.comm import IN_TURN, Communicator

_tokens: dict[int, tf.Tensor] = {}  # by line: ranks that are threads exchange side by side
# As in cpp/core/cpu/message.h: stages of a call, and the int64 words of a head.
_KEYS, _ROWS, _NOTES = 1, 2, 4
_HEAD = 8


@contextlib.contextmanager
def turn() -> Iterator[list[Any]]:
    """A scope without other exchanges of this process. Yields a list for what ends the turn."""
    done: list[Any] = []
    graph = None if tf.executing_eagerly() else tf.compat.v1.get_default_graph()
    if graph is None:
        yield done
    elif graph.building_function:
        token, ops = _token_here(), libraries.ops()
        # TensorFlow does not order the ops in gradients of functions that it makes by itself.
        earlier = getattr(graph, "_sok_turn", None)
        with tf.control_dependencies([] if earlier is None else [earlier]):
            begin = ops.sok_turn(token=token)
        with tf.control_dependencies([begin]):
            yield done
        with tf.control_dependencies(done):
            graph._sok_turn = ops.sok_turn(token=token)
    elif graph._get_control_flow_context() is not None:  # in a loop or branch of TF 1
        yield done
    else:
        graph._sok_number = graph._sok_last_turn = getattr(graph, "_sok_last_turn", 0) + 1
        try:
            begin = libraries.ops().sok_turn(token=_token_here(), number=graph._sok_number)
            with tf.control_dependencies([begin]):
                yield done
        finally:
            graph._sok_number = None


def _ends_numbered_turn(results):
    """Ops that mark the end of a numbered turn once `results` are there; elsewhere none."""
    graph = None if tf.executing_eagerly() else tf.compat.v1.get_default_graph()
    number = getattr(graph, "_sok_number", None)
    if number is None:
        return []
    with tf.control_dependencies(results):
        return [libraries.ops().sok_turn(token=_token_here(), number=number, ends=True)]


def exchange_in_turn(collective: Callable[[], Any], name: str, communicator: Communicator) -> Any:
    """Runs a collective of `communicator` in a turn, and returns its tensors."""
    # In a graph the transport matches collectives by `name`. Eagerly it takes them as they come, so
    # the ranks first tell each other which one they are in, and raise if it is not one.
    if tf.executing_eagerly() and communicator.world_size > 1:
        exchange_notes(tf.zeros([0], tf.int64), communicator, name)

    def run():
        # An absolute scope: names that Keras numbers ("functional_3") may differ between ranks.
        with tf.name_scope("sok_turn/"):
            return collective()

    with turn() as done:
        result = _waiting_for(name, [], run)
        done += _tensors(result)
        ends = _ends_numbered_turn(done)
    return result if not ends else _behind(ends, result)


def collective_in_turn(
    communicator: Communicator, collective: str, value: Any, name: str, *more: Any
) -> Any:
    """`exchange_in_turn` of a collective such as "all_gather"; `more`: those after `value`."""
    run = getattr(communicator, collective)
    return exchange_in_turn(lambda: run(value, *more, name), name, communicator)


@dataclasses.dataclass(frozen=True)
class Lookup:
    """What the two exchanges of a lookup have in common."""

    communicator: Communicator
    name: str  # of its collectives; the same on all ranks
    # Called where the gradient of the rows is taken, which waits for the tensors returned.
    before_gradient: Callable[[Communicator], list[tf.Tensor]]
    wire_dtype: str | None  # as which rows and their gradients travel; None: float32
    said: str = ""  # the lookup's name in errors, by default `name`


def exchange_keys(
    message: tf.Tensor, splits: tf.Tensor, lookup: Lookup
) -> tuple[tf.Tensor, tf.Tensor]:
    """`exchange` of an int64 message of keys, which begins a call; ranks agree on the lookup."""
    stamped = _stamped(message, splits, lookup.said or lookup.name, _KEYS, lookup.wire_dtype)
    return exchange(stamped, splits, lookup.communicator, f"{lookup.name}_keys")[:2]


def exchange_notes(
    values: tf.Tensor,
    communicator: Communicator,
    name: str,
    problems: Sequence[tf.Tensor] = (),
    said: str = "",
) -> tuple[tf.Tensor, tf.Tensor]:
    """Every rank sends a note to all: int64 `values`. Returns all by rank, and their numbers."""
    # All ranks raise if one has `problems`, or if they differ in `said`, the call in errors.
    ops, world_size = libraries.ops(), communicator.world_size
    message, splits = ops.sok_pack_note(
        values=values, problems=list(problems), world_size=world_size
    )
    with turn() as done:
        stamped = _stamped(message, splits, said or name, _NOTES)
        message, splits, _ = exchange(stamped, splits, communicator, f"{name}_notes")
        done.append(message)
    return tuple(ops.sok_unpack_note(message=message, splits=splits, world_size=world_size))


def head_of_rows(name: str, wire_dtype: str | None = None) -> tf.Tensor:
    """float32 `[16]`: the head of each block of a row message of lookup `name`; within a turn."""
    words = _stamped(tf.zeros([_HEAD], tf.int64), [_HEAD], name, _ROWS, wire_dtype)
    return tf.reshape(tf.bitcast(words, tf.float32), [-1])


def head_of_gradients(call: tf.Tensor) -> tf.Tensor:
    """float32 `[16]`: the head of each block of the gradients of a call's rows."""
    next_stage = tf.one_hot(1, _HEAD, tf.constant(1 << 56, tf.int64), tf.constant(0, tf.int64))
    return tf.reshape(tf.bitcast(call + next_stage, tf.float32), [-1])


def _stamped(message, splits, lookup, stage, wire_dtype=None):
    """The message, with the number and name of its call in the heads of its blocks."""
    return _on_messages(
        libraries.ops().sok_stamp_call,
        message=message,
        splits=splits,
        lookup=lookup,
        line=comm.line(),
        stage=stage,
        wire_dtype=wire_dtype or tf.float32,
    )


def _on_messages(op, *inputs, **attributes):
    """An op that takes messages, on their device: they have no table to follow."""
    with devices.message_scope():
        return op(*inputs, **attributes)


def exchange(
    message: tf.Tensor, splits: tf.Tensor, communicator: Communicator, name: str
) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
    """Sends each rank its block of a message, int64 or float32; within a turn.

    The blocks begin with a head. The message travels at once, or in rounds if the transport cannot
    count its words; the heads, which travel in the first round, say how many there are. All ranks
    raise a problem that one reports, and FailedPreconditionError if they are in different calls.
    Returns the message received, its splits, and int64 `[8]`, the call that it belongs to.
    """
    words, ops = message.dtype.size // tf.float32.size, libraries.ops()
    # Under a tape TensorFlow would differentiate the loop below; callers have their own gradient.
    message = tf.stop_gradient(message)
    # Always float32: keys that meet gradients then raise our error, which names the calls.
    carried = tf.reshape(tf.bitcast(message, tf.float32), [-1]) if words > 1 else message
    with tf.init_scope():
        ordered = tf.executing_eagerly()  # also while a function called eagerly is traced

    def send(number):
        # The names differ, so that an exchange in a session never meets one outside.
        what, collective = (name, IN_TURN) if ordered else (f"{name} (in a session)", name)
        with tf.name_scope(f"{name}_exchange"):
            part = _on_messages(ops.sok_take_part, carried, splits * words, number)
            return _waiting_for(what, part, lambda: communicator.all_to_all(*part, collective))

    received, lengths = send(0)
    world_size = communicator.world_size
    call, more = _on_messages(ops.sok_check_message, received, lengths, world_size=world_size)
    state = received, lengths, call
    if ordered and not tf.executing_eagerly() and not devices.gpu_in_use():
        config = tf.compat.v1.ConfigProto()  # with which the call does not optimize it again
        config.graph_options.rewrite_options.disable_meta_optimizer = True
        # Not an ordinary call of the function: Python would describe the devices each time.
        state = tf.raw_ops.StatefulPartitionedCall(
            args=[carried, splits * words, more, *state],
            Tout=[tensor.dtype for tensor in state],
            f=_rounds_function(communicator),
            config_proto=config.SerializeToString(),
        )
    else:
        state = _further_rounds(send, more, *state)
    received, lengths, call = state
    with tf.control_dependencies([call, *_ends_numbered_turn([received, call])]):
        if words > 1:
            received = tf.bitcast(tf.reshape(received, [-1, words]), message.dtype)
        return tf.identity(received), lengths // words, call


def _further_rounds(send, more, received, lengths, call):
    """The message of all rounds, its splits, and its call; `more` rounds follow the first."""
    ops, check = libraries.ops(), {"world_size": lengths.shape[0]}

    def next_round(number, received, lengths, _):
        whole = _on_messages(ops.sok_join_parts, received, lengths, *send(number))
        return number + 1, *whole, _on_messages(ops.sok_check_message, *whole, **check).call

    any_length = tf.TensorShape([None])
    return tf.while_loop(
        lambda number, *_: number <= more,
        next_round,
        (1, received, lengths, call),
        parallel_iterations=1,
        shape_invariants=(tf.TensorShape([]), any_length, lengths.shape, call.shape),
    )[1:]


def _rounds_function(communicator):
    """`_further_rounds` as one function for all exchanges of a communicator."""
    # A loop per exchange made the first step of a model several times as long: TensorFlow
    # optimizes and instantiates the two functions of each loop.
    if hasattr(communicator, "_sok_rounds"):
        return communicator._sok_rounds
    vector, scalar = tf.TensorSpec([None]), tf.TensorSpec([], tf.int32)
    splits = tf.TensorSpec([communicator.world_size], tf.int32)
    call = tf.TensorSpec([_HEAD], tf.int64)

    @tf.function(
        autograph=False,
        input_signature=[vector, splits, scalar, vector, splits, call],
        experimental_attributes={"_noinline": True},
    )
    def rounds(carried, splits, more, *state):
        def send(number):
            part = _on_messages(libraries.ops().sok_take_part, carried, splits, number)
            what = "further rounds of a long message"
            return _waiting_for(what, part, lambda: communicator.all_to_all(*part, IN_TURN))

        return _further_rounds(send, more, *state)

    communicator._sok_rounds = rounds.get_concrete_function()
    return communicator._sok_rounds


def exchange_rows(
    rows: tf.Tensor, splits: tf.Tensor, lookup: Lookup
) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
    """`exchange`, differentiable in `rows`: the gradient travels back in a turn of its own."""

    def exchange_floats(message, splits, part):
        name = f"{lookup.name}_{part}"
        if lookup.wire_dtype is None:
            return exchange(message, splits, lookup.communicator, name)
        narrow, narrow_splits = libraries.ops().sok_narrow_rows(message=message, splits=splits)
        received, lengths, call = exchange(narrow, narrow_splits, lookup.communicator, name)
        return *libraries.ops().sok_widen_rows(narrow=received, narrow_splits=lengths), call

    # Splits are arguments, too: in a v1 graph TensorFlow goes back from captured tensors, and takes
    # any variable it finds for one that the function reads.
    @tf.custom_gradient
    def run(rows, splits):
        received, lengths, call = exchange_floats(rows, splits, "rows")

        @tf.custom_gradient
        def send_back(grad, lengths):
            with turn() as done:
                returned, _, returned_call = exchange_floats(grad, lengths, "rows_grad")
                done.append(returned_call)

            def refused(second):
                return graphs.refuse_second_order([second], [grad])[0], None

            return returned, refused

        def back(grad, *_):
            with tf.control_dependencies(lookup.before_gradient(lookup.communicator)):
                return send_back(grad, lengths), None

        return (received, lengths, call), back

    return run(rows, splits)


def _waiting_for(what, inputs, collective):
    """Runs `collective` after `inputs`; until it is done, this process waits for `what`."""
    ops = libraries.ops()
    with tf.control_dependencies(inputs):
        wait = ops.sok_begin_wait(what=what)
    try:
        with tf.control_dependencies([wait]):
            result = collective()
    except BaseException as error:  # by Ctrl-C, too
        ops.sok_end_wait(id=wait)
        if isinstance(error, tf.errors.OpError):
            stalls.raise_reason(error)
        raise
    with tf.control_dependencies(_tensors(result)):
        end = ops.sok_end_wait(id=wait)
    return result if tf.executing_eagerly() else _behind([end, ops.sok_watch(id=wait)], result)


def _tensors(result):
    return [t for t in tf.nest.flatten(result, expand_composites=True) if t is not None]


def _behind(ops, result):
    """The same tensors, available once the ops have run."""
    with tf.control_dependencies(ops):
        return tf.nest.map_structure(
            lambda t: None if t is None else tf.identity(t), result, expand_composites=True
        )


def _token_here():
    """The token: one for a process, or one for each v1 graph."""
    line, tokens = comm.line(), _tokens
    with tf.init_scope():
        if not tf.executing_eagerly():
            graph = tf.compat.v1.get_default_graph()
            if not hasattr(graph, "_sok_tokens"):
                graph._sok_tokens = {}
            tokens = graph._sok_tokens
        if line not in tokens:
            with tf.device("CPU:0"):
                tokens[line] = tf.raw_ops.VarHandleOp(
                    dtype=tf.int64, shape=[], shared_name=f"sok_turns{line}"
                )
    # The gradient of a loop's body can take only resources of that body.
    forward = getattr(tf.compat.v1.get_default_graph(), "_forward_graph", None)
    return tokens[line] if forward is None else forward.capture(tokens[line])
