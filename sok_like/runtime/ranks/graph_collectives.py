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
    """Steps of one call, one after the other, taken at once; outside of graphs.

    Args:
        call: The user's call, for the error of ranks in different calls.
        alone_alike: Whether a single rank raises what several would: RuntimeError, "rank 0: ...".
    """

    def __init__(self, call: str, alone_alike: bool = False):
        self.call, self._alone_alike, self._communicator = call, alone_alike, comm.current()
        self._told: list[Any] = []  # all ranks' messages of the last step, once there is one

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
                in the first step) and the inputs. Returns this rank's message (JSON, or None),
                followed by the outputs if there are any.
            inputs: Tensors; within a graph the function gets them as NumPy arrays.
            outputs: Dtypes of the outputs.
            verify: Called with all ranks' messages. What it raises, it must raise on all ranks.
            undo: Called if a rank has failed, before the error is raised.

        Returns:
            The outputs as tensors, within a graph available once no rank has failed.

        Raises:
            RuntimeError: `rank r: ...`, on all ranks; tf.errors.ResourceExhaustedError for a
                MemoryError. A single rank raises the exception itself unless it is `alone_alike`.
        """
        found: list[Any] = []
        dtypes = list(outputs)

        def run():
            message = function(*self._told, *inputs)
            if dtypes:
                message, *found[:] = message
            return message

        try:
            told = self._agreed(run)
            if verify is not None:
                verify(told)
        except BaseException as error:
            # Otherwise another rank may go on, and publish what this one removes.
            if undo is not None and agreement.raised_on_all(error, self._communicator):
                with contextlib.suppress(Exception):  # the reason to undo is what counts
                    undo()
            raise
        self._told = [told]
        return [tf.constant(value, dtype) for value, dtype in zip(found, dtypes, strict=True)]

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
        dtypes, name, previous = list(outputs), f"{self._name}_{self._count}", self._told
        self._count += 1

        def guarded(*arguments):
            try:
                told = [json.loads(text_of(text)) for text in arguments[: len(previous)]]
                results = function(*told, *arguments[len(previous) :])
                said, *found = results if dtypes else (results,)
                return (self._encoded({"said": said}), *found)
            except Exception as error:
                return (self._encoded(agreement.problem_of(error)), *map(_blank, dtypes))

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
            say, *found = tf.numpy_function(guarded, [*previous, *inputs], [tf.int64, *dtypes])
        say.set_shape([None])
        (told,) = tf.numpy_function(compare, self._exchanged(say, name), [tf.string])
        told.set_shape([])
        self._told = [told]
        with self.done():
            return [tf.identity(tensor) for tensor in found]

    def _exchanged(self, say, name):
        if self._communicator.world_size == 1:
            return [say, tf.shape(say)]
        with agreement.naming(self.call):
            return list(exchange_order.exchange_notes(say, [], self._communicator, name))

    def _encoded(self, message):
        return agreement.encoded({**message, "call": self.call})

    def done(self):
        return tf.control_dependencies(self._told)

    def end(self, result):
        with self.done(), tf.control_dependencies([self._mark()]):
            return tf.identity(result)


def text_of(scalar: Any) -> bytes:
    """The bytes of a string scalar, which is bytes in a graph and an array when eager."""
    return np.asarray(scalar, dtype=object).item()


def _blank(dtype):
    return np.zeros([0], object if dtype == tf.string else dtype.as_numpy_dtype)
