"""Work in steps that all ranks take together: Python code that may fail, in a graph or not.

A rank that raised by itself would leave the others waiting in the next collective. So each step
catches its error and tells all ranks, and every rank raises the first rank's problem.
`agreement.agreed` does the same for code outside of graphs.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from sok_like.runtime.ranks import agreement, exchange_order
from sok_like.runtime.ranks.comm import Communicator


class Steps:
    """Steps of one call, one after the other.

    Args:
        communicator: Of the ranks that take the steps.
        name: Of their collectives in a v1 graph; the same on all ranks.
        call: The user's call, for the error of ranks in different calls.
        mark: Makes an op that reads and writes the resource of the call. Python functions that a
            graph calls use no resource, so nothing would order them. In a tf.function these ops
            put the call after what precedes it in the program, and before what follows `end`.
    """

    def __init__(
        self,
        communicator: Communicator,
        name: str,
        call: str,
        mark: Callable[[], Any] | None = None,
    ):
        self._communicator, self._name, self._call = communicator, name, call
        self._mark = None if tf.executing_eagerly() else mark
        self._begun = [self._mark()] if self._mark is not None else []
        self._told: Any = None  # string scalar: all ranks' messages of the last step, in JSON
        self._count = 0

    def take(
        self,
        function: Callable,
        inputs: Sequence[Any] = (),
        outputs: Iterable[Any] = (),
        verify: Callable[[list], None] | None = None,
        undo: Callable[[], None] | None = None,
    ) -> list:
        """Runs `function` on every rank, then compares the ranks' messages.

        Args:
            function: Called with all ranks' messages of the step before (a list by rank; left out
                in the first step) and the inputs as NumPy arrays. Returns this rank's message
                (JSON, or None), followed by the outputs if there are any.
            inputs: Tensors.
            outputs: Dtypes of the outputs.
            verify: Called with all ranks' messages. What it raises, it must raise on all ranks.
            undo: Called if a rank has failed, before the error is raised.

        Returns:
            The output tensors, available once no rank has failed.

        Raises:
            RuntimeError: `rank r: ...`, on all ranks; tf.errors.ResourceExhaustedError for a
                MemoryError.
        """
        dtypes, name = list(outputs), f"{self._name}_{self._count}"
        previous = [] if self._told is None else [self._told]
        self._count += 1

        def guarded(*arguments):
            try:
                told = [json.loads(text_of(text)) for text in arguments[: len(previous)]]
                results = function(*told, *arguments[len(previous) :])
                said, *found = results if dtypes else (results,)
                return (self._encoded({"said": said}), *found)
            except Exception as error:
                return (self._encoded(agreement.problem_of(error)), *map(_blank, dtypes))

        with tf.control_dependencies(self._begun):
            say, *found = _call(guarded, [*previous, *inputs], [tf.int64, *dtypes])
        say.set_shape([None])
        texts, lengths = self._exchanged(say, name)

        in_graph = not tf.executing_eagerly()  # now: when an op runs, Python is eager

        def compare(texts, lengths):
            messages = agreement.decoded(texts, lengths)
            try:
                agreement.raise_first(messages, in_graph=in_graph)
                said = [message["said"] for message in messages]
                if verify is not None:
                    verify(said)
            except BaseException:
                if undo is not None:
                    with contextlib.suppress(OSError):  # the reason to undo is what counts
                        undo()
                raise
            return json.dumps(said).encode()

        self._told = _call(compare, [texts, lengths], [tf.string])[0]
        self._told.set_shape([])
        with self.done():
            return [tf.identity(tensor) for tensor in found]

    def _exchanged(self, say, name):
        communicator = self._communicator
        if communicator.world_size == 1:
            return say, tf.shape(say)
        name = agreement.name_of(communicator) if tf.executing_eagerly() else name
        with agreement.naming(self._call):
            return exchange_order.exchange_notes(say, [], communicator, name)

    def _encoded(self, message):
        return agreement.encoded({**message, "call": self._call})

    def done(self) -> Any:
        """A context in which ops run after the last step."""
        eager = tf.executing_eagerly()  # the step has run already
        return tf.control_dependencies([] if eager else [self._told])

    def end(self, result: Any) -> Any:
        """`result`, a tensor, once the call is done; later ops of a tf.function wait for it."""
        with self.done():
            marks = [self._mark()] if self._mark is not None else []
            with tf.control_dependencies(marks):
                return tf.identity(result)


def text_of(scalar: Any) -> bytes:
    """The bytes of a string scalar, which is bytes in a graph and an array when eager."""
    return np.asarray(scalar, dtype=object).item()


def _call(function, inputs, dtypes):
    outputs = tf.numpy_function(function, inputs, dtypes)
    # TensorFlow returns a single output by itself when eager, and in a list in a graph.
    return list(outputs) if isinstance(outputs, (list, tuple)) else [outputs]


def _blank(dtype):
    return np.zeros([0], object if dtype == tf.string else dtype.as_numpy_dtype)
