"""Work in steps that all ranks take together: Python code that may fail, inside a graph or not.

A rank that raised by itself would leave the others waiting in the next collective. So a step keeps
what went wrong to itself, tells all ranks, and every rank raises the first rank's problem.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from sok_like.runtime import turns
from sok_like.runtime.comm import Communicator


class Steps:
    """Steps of one call, one after the other.

    Args:
        communicator: Of the ranks that take them.
        name: Of their collectives; the same on all ranks.
    """

    def __init__(self, communicator: Communicator, name: str):
        self._communicator, self._name = communicator, name
        self._told: Any = None  # string scalar: what all ranks said at the last step, in JSON
        self._count = 0

    def take(
        self,
        function: Callable,
        inputs: Sequence[Any] = (),
        outputs: Iterable[Any] = (),
        verify: Callable[[list], None] | None = None,
        undo: Callable[[], None] | None = None,
    ) -> list:
        """Runs `function` on every rank, then compares notes.

        Args:
            function: Called with what all ranks said at the step before (a list by rank; nothing at
                the first step) and the inputs as NumPy arrays. Returns what this rank says (JSON,
                or None), followed by the outputs if there are any.
            inputs: Tensors.
            outputs: Their dtypes.
            verify: Called with what all ranks say; what it raises, it must raise on all of them.
            undo: Called where a rank has failed, before that is raised.

        Returns:
            The output tensors, which are there once no rank has failed.

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
                return (_encoded({"said": said}), *found)
            except Exception as error:
                memory = isinstance(error, MemoryError) and bool(str(error))
                text = str(error) if memory else f"{type(error).__name__}: {error}"
                message = {"error": text, "memory": memory}
                return (_encoded(message), *map(_blank, dtypes))

        say, *found = _call(guarded, [*previous, *inputs], [tf.uint8, *dtypes])
        say.set_shape([None])
        lengths = self._gather(tf.shape(say), f"{name}_lengths")
        texts = self._gather(say, f"{name}_texts")

        def compare(lengths, texts):
            ends = np.cumsum(lengths)
            parts = (bytes(texts[end - n : end]) for end, n in zip(ends, lengths, strict=True))
            messages = [json.loads(part) for part in parts]
            try:
                _raise_first(messages)
                said = [message["said"] for message in messages]
                if verify is not None:
                    verify(said)
            except BaseException:
                if undo is not None:
                    undo()
                raise
            return json.dumps(said).encode()

        self._told = _call(compare, [lengths, texts], [tf.string])[0]
        self._told.set_shape([])
        with self.done():
            return [tf.identity(tensor) for tensor in found]

    def _gather(self, tensor, name):
        # Not by the table's name: that ranks are at different tables is for the steps to say.
        gather, communicator = self._communicator.all_gather, self._communicator
        return turns.in_turn(lambda: gather(tensor, name), "sok_saver", communicator)

    def done(self) -> Any:
        """A context in which ops come after the last step."""
        eager = tf.executing_eagerly()  # it has happened
        return tf.control_dependencies([] if eager else [self._told])


def text_of(scalar: Any) -> bytes:
    """A string scalar as such a function is given it: in a graph bytes, when eager an array."""
    return np.asarray(scalar, dtype=object).item()


def _call(function, inputs, dtypes):
    outputs = tf.numpy_function(function, inputs, dtypes)
    # TF returns one output by itself when eager, in a list in a graph.
    return list(outputs) if isinstance(outputs, (list, tuple)) else [outputs]


def _encoded(message):
    return np.frombuffer(json.dumps(message).encode(), np.uint8)


def _blank(dtype):
    return np.zeros([0], object if dtype == tf.string else dtype.as_numpy_dtype)


def _raise_first(messages):
    for rank, message in enumerate(messages):
        if "error" not in message:
            continue
        text = f"rank {rank}: {message['error']}"
        if not message["memory"]:
            raise RuntimeError(text)
        # In a graph only Python's own exception becomes TensorFlow's.
        raise (
            tf.errors.ResourceExhaustedError(None, None, text)
            if tf.executing_eagerly()
            else (MemoryError(text))
        )
