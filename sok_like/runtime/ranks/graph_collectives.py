"""Work in steps that all ranks take together: Python code that may fail, at once or in a graph.

A rank that raised by itself would leave the others waiting in the next collective. So each step
catches its error and tells all ranks, and every rank raises the first rank's problem.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from sok_like.runtime.ranks import agreement, comm, exchange_order


class Steps:
    """Steps of one call of the user, one after the other, taken at once; outside of graphs.

    `alone_alike`: whether a single rank raises what several would, RuntimeError, "rank 0: ...".
    """

    def __init__(self, call: str, alone_alike: bool = False):
        self.call, self._alone_alike, self._communicator = call, alone_alike, comm.current()
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

        Args:
            function: Called with all ranks' messages of the step before (a list by rank; left out
                in the first step) and the inputs. Returns this rank's message (JSON, or None),
                followed by the outputs if there are any.
            inputs: Tensors; within a graph the function gets them as NumPy arrays.
            outputs: Dtypes of the outputs, which are returned as tensors. Within a graph they are
                available once no rank has failed.
            verify: Called with all ranks' messages. What it raises, it must raise on all ranks.
            undo: Called if a rank has failed, before the error is raised.
        """
        results: list[Any] = []
        dtypes = list(outputs)

        def run():
            message = function(*self._messages, *inputs)
            if dtypes:
                message, *results[:] = message
            return message

        try:
            messages = self._agreed(run)
            if verify is not None:
                verify(messages)
        except BaseException as error:
            # Otherwise another rank may go on, and publish what this one removes.
            if undo is not None and agreement.raised_on_all(error, self._communicator):
                with contextlib.suppress(Exception):  # the reason to undo is what counts
                    undo()
            raise
        self._messages = [messages]
        return [tf.constant(value, dtype) for value, dtype in zip(results, dtypes, strict=True)]

    def _agreed(self, function):
        try:
            return agreement.agreed(function, self._communicator, self.call)
        except Exception as error:
            alone = self._alone_alike and self._communicator.world_size == 1
            if alone and not isinstance(error, RuntimeError):
                agreement.raise_first([agreement.problem_of(error)], cause=error)
            raise

    def done(self) -> Any:
        """A context in which ops run after the last step."""
        return contextlib.nullcontext()  # the step has run already

    def end(self, result: Any) -> Any:
        """`result` as a tensor, once the call is done; later ops of a tf.function wait for it."""
        return tf.identity(result)


class GraphSteps(Steps):
    """The same within a graph: each step is an op.

    Args:
        name: Of the collectives in a v1 graph; the same on all ranks.
        mark: Makes an op that reads and writes the resource of the call. Python functions that a
            graph calls use no resource, so nothing would order them. In a tf.function these ops
            put the call after what precedes it in the program, and before what follows `end`.
    """

    def __init__(self, call: str, name: str, mark: Callable[[], Any]):
        super().__init__(call)
        self._name, self._count, self._mark, self._begun = name, 0, mark, [mark()]

    def take(self, function, inputs=(), outputs=(), verify=None, undo=None):
        dtypes, name, previous = list(outputs), f"{self._name}_{self._count}", self._messages
        self._count += 1

        def as_note(message):
            return agreement.encoded({**message, "call": self.call})

        def guarded(*arguments):
            try:
                messages = [json.loads(text_of(text)) for text in arguments[: len(previous)]]
                results = function(*messages, *arguments[len(previous) :])
                said, *values = results if dtypes else (results,)
                return (as_note({"said": said}), *values)
            except Exception as error:
                as_numpy = (object if t == tf.string else t.as_numpy_dtype for t in dtypes)
                nothing = (np.zeros([0], dtype) for dtype in as_numpy)
                return (as_note(agreement.problem_of(error)), *nothing)

        def compare(texts, lengths):
            messages = agreement.decoded(texts, lengths)
            try:
                agreement.raise_first(messages, in_graph=True)
                said = [message["said"] for message in messages]
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
            with agreement.naming(self.call):
                notes = exchange_order.exchange_notes(note, [], self._communicator, name)
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
