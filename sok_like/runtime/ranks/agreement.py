"""Agreement between ranks: work that may fail on one of them, and errors that every rank raises.

A rank that raised by itself would leave the others waiting in the next collective. So each piece of
work catches its error and tells all ranks, and every rank raises the first rank's problem. `agreed`
does so for one piece, `Steps` for the steps of one call of the user.

`GraphSteps` works in graphs, all else outside of graphs only.
"""

import contextlib
import functools
import json
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from sok_like.runtime.ranks import comm, exchange_order
from sok_like.runtime.ranks.comm import Communicator, run_now


def send(
    block: np.ndarray, communicator: Communicator, all_ranks: bool, name: str = "dmp_get_weights"
) -> np.ndarray:
    """Gathers flat blocks in rank order, on rank 0 or on all, in a turn called `name`."""
    in_turn = functools.partial(exchange_order.collective_in_turn, communicator)
    if all_ranks:
        return in_turn("all_gather", tf.constant(block), name).numpy()
    splits = tf.constant([block.size] + [0] * (communicator.world_size - 1), tf.int32)
    return in_turn("all_to_all", tf.constant(block), name, splits)[0].numpy()


def agreed(
    function: Callable[[], Any] | None,
    communicator: Communicator,
    call: str = "",
    raises: type[Exception] = RuntimeError,
) -> list:
    """Calls `function`, unless None, on every rank; returns its results (JSON) by rank."""
    # If one rank fails, all raise `raises`, "rank r: problem"; a single rank the exception itself.
    # Ranks in different calls (of the user) raise RuntimeError.
    if communicator.world_size == 1:
        return [None if function is None else function()]
    error = None
    try:
        message = {"said": None if function is None else function()}
    except Exception as raised:
        error, message = raised, _problem_of(raised)
    words = _encoded({**message, "call": call})
    # One name for all calls, so that unequal calls meet; a subset of the ranks has its own.
    name = f"agreement_{communicator.world_size}"
    with _naming(call):
        notes = run_now(lambda: exchange_order.exchange_notes(words, communicator, name))
    return _said(_decoded(*notes), raises, error)


def check_same(
    values: Sequence[Any], required: str, raises: type[Exception] = RuntimeError
) -> None:
    """Raises unless the values, by rank, are equal; `required` says of what."""
    for rank, value in enumerate(values):
        if value != values[0]:
            raise raises(f"{required}. Received: {value} on rank {rank} and {values[0]} on rank 0")


def raised_on_all(error: BaseException, communicator: Communicator) -> bool:
    """Whether `agreed` raised it on all ranks, once all had said how far they have come."""
    agreed_errors = (RuntimeError, tf.errors.ResourceExhaustedError)
    return communicator.world_size == 1 or isinstance(error, agreed_errors)


def all_or_none(
    function: Callable[[], Any] | None, communicator: Communicator, call: str = ""
) -> Any:
    """`function()` of this rank, None without one; if one rank's raises, all raise ValueError."""
    results = [None]

    def run():
        results[0] = function()

    agreed(run if function else None, communicator, call, ValueError)
    return results[0]


@contextlib.contextmanager
def _naming(call):
    """Adds this rank's call to the error raised where the other ranks make no such call."""
    try:
        yield
    except (tf.errors.FailedPreconditionError, tf.errors.DeadlineExceededError) as error:
        text = f"{error.message}. This rank is in {call}, which all ranks must call"
        raise type(error)(None, None, text if call else error.message) from error


def _problem_of(error):
    """The message to other ranks about an exception."""
    memory = isinstance(error, MemoryError) and bool(str(error))
    named = memory or isinstance(error, tf.errors.OpError)
    text = str(getattr(error, "message", error)) if named else f"{type(error).__name__}: {error}"
    return {"error": text, "memory": memory or isinstance(error, tf.errors.ResourceExhaustedError)}


def _said(messages, raises=RuntimeError, cause=None, in_graph=False):
    """What the ranks said; raises the problem of the first that has one, or the calls that differ.

    `in_graph`: where TensorFlow translates only Python's own exceptions.
    """
    for rank, message in enumerate(messages):
        if "error" in message:
            text = f"rank {rank}: {message['error']}"
            if not message["memory"]:
                raise raises(text) from cause
            if in_graph:
                raise MemoryError(text) from cause
            raise tf.errors.ResourceExhaustedError(None, None, text) from cause
    calls = [message["call"] or "another call" for message in messages]
    check_same(calls, "All ranks must make the same calls in the same order")
    return [message["said"] for message in messages]


def _encoded(message):
    """JSON as int64, eight bytes per word: the form of the ranks' messages."""
    text = json.dumps(message).encode()
    return np.frombuffer(text + b" " * (-len(text) % 8), np.int64)


def _decoded(words, lengths):
    """The messages of all ranks, by rank; the inverse of `_encoded`."""
    ends = np.cumsum(lengths)
    parts = (words[end - n : end] for end, n in zip(ends, lengths, strict=True))
    return [json.loads(np.ascontiguousarray(part).tobytes()) for part in parts]


class Steps:
    """Steps of one call of the user, one after the other, taken at once; outside of graphs.

    A single rank raises what several would, RuntimeError, "rank 0: ..."; with `own_error` the
    exception itself.
    """

    def __init__(self, call: str, own_error: bool = False):
        self.call, self._own_error, self._communicator = call, own_error, comm.current()
        self._messages: list[Any] = []  # of all ranks, of the last step, once there is one

    def take(
        self,
        function: Callable,
        inputs: Sequence[Any] = (),
        outputs: Iterable[Any] = (),
        verify: Callable[[list], None] | None = None,
        undo: Callable[[], None] | None = None,
    ) -> list:
        """Runs `function` on every rank, then compares the ranks' messages as `agreed` does.

        `function` is called with all ranks' messages of the step before (a list by rank; none in
        the first step) and the inputs. Returns this rank's message (JSON, or None), followed by the
        outputs, of these dtypes, if there are any. They are returned as tensors.

        `verify` is called with all ranks' messages. What it raises, it must raise on all ranks.
        `undo` is called if a rank has failed, before the error is raised.
        """
        results: list[Any] = []
        dtypes = list(outputs)

        def run():
            try:
                message = function(*self._messages, *inputs)
            except Exception as error:
                alone = self._communicator.world_size == 1 and not self._own_error
                if alone and not isinstance(error, RuntimeError):
                    _said([_problem_of(error)], cause=error)
                raise
            if dtypes:
                message, *results[:] = message
            return message

        try:
            messages = agreed(run, self._communicator, self.call)
            if verify is not None:
                verify(messages)
        except BaseException as error:
            # Otherwise another rank may go on, and publish what this one removes.
            if undo is not None and raised_on_all(error, self._communicator):
                with contextlib.suppress(Exception):  # the reason to undo is what counts
                    undo()
            raise
        self._messages = [messages]
        return [tf.constant(value, dtype) for value, dtype in zip(results, dtypes, strict=True)]

    def done(self) -> Any:
        """A context in which ops run after the last step."""
        return contextlib.nullcontext()  # the step has run already

    def end(self, result: Any) -> Any:
        """`result` as a tensor, once the call is done; later ops of a tf.function wait for it."""
        return tf.identity(result)


class GraphSteps(Steps):
    """The same within a graph: each step is an op, whose collective has `name` in a v1 graph.

    Python functions that a graph calls use no resource, so nothing would order them. `mark` makes
    an op that reads and writes the resource of the call. In a tf.function these ops put the call
    after what precedes it in the program, and before what follows `end`.
    """

    def __init__(self, call: str, name: str, mark: Callable[[], Any]):
        super().__init__(call)
        self._name, self._count, self._mark, self._begun = name, 0, mark, [mark()]

    def take(self, function, inputs=(), outputs=(), verify=None, undo=None):
        dtypes, name, previous = list(outputs), f"{self._name}_{self._count}", self._messages
        self._count += 1

        def guarded(*arguments):
            try:
                messages = [json.loads(text_of(text)) for text in arguments[: len(previous)]]
                results = function(*messages, *arguments[len(previous) :])
                own, *values = results if dtypes else (results,)
                note = _encoded({"said": own, "call": self.call})
            except Exception as error:
                as_numpy = (object if t == tf.string else t.as_numpy_dtype for t in dtypes)
                values = [np.zeros([0], dtype) for dtype in as_numpy]
                note = _encoded({**_problem_of(error), "call": self.call})
            return (note, *values)

        def compare(texts, lengths):
            try:
                said = _said(_decoded(texts, lengths), in_graph=True)
                if verify is not None:
                    verify(said)
            except BaseException:
                if undo is not None:
                    with contextlib.suppress(Exception):
                        undo()
                raise
            return json.dumps(said).encode()

        with tf.control_dependencies(self._begun):
            note, *values = tf.numpy_function(guarded, [*previous, *inputs], [tf.int64, *dtypes])
        note.set_shape([None])
        notes = [note, tf.shape(note)]
        if self._communicator.world_size > 1:
            with _naming(self.call):
                notes = exchange_order.exchange_notes(note, self._communicator, name)
        (messages,) = tf.numpy_function(compare, list(notes), [tf.string])
        messages.set_shape([])
        self._messages = [messages]
        with self.done():
            return [tf.identity(tensor) for tensor in values]

    def done(self):
        return tf.control_dependencies(self._messages)

    def end(self, result):
        with self.done(), tf.control_dependencies([self._mark()]):
            return tf.identity(result)


def text_of(scalar: Any) -> bytes:
    """The bytes of a string scalar, which is bytes in a graph and an array when eager."""
    return np.asarray(scalar, dtype=object).item()
