"""How ranks agree on what they do together, and raise on all what went wrong on one.

`raise_on_all` works in graphs as well; the others are eager.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from sok_like.runtime import turns
from sok_like.runtime.comm import Communicator


def send(block: np.ndarray, communicator: Communicator, all_ranks: bool) -> np.ndarray:
    """Flat blocks of all ranks in rank order, on rank 0 or on all."""
    mine, name = tf.constant(block), "dmp_get_weights"

    def collective():
        if all_ranks:
            return communicator.all_gather(mine, name)
        splits = [block.size] + [0] * (communicator.world_size - 1)
        return communicator.all_to_all(mine, tf.constant(splits, tf.int32), name)[0]

    return turns.in_turn(collective, name, communicator).numpy()


def gather_text(text: str, communicator: Communicator) -> str:
    """The ranks' texts, one behind the other."""
    letters = np.frombuffer(text.encode(), np.uint8).astype(np.int64)
    told, _ = turns.exchange_notes(tf.constant(letters), [], communicator, "texts")
    return told.numpy().astype(np.uint8).tobytes().decode()


def raise_on_all(problems: Sequence[Any], communicator: Communicator, name: str) -> list[tf.Tensor]:
    """Raises on all ranks where any has a problem: the first problem of the first such rank.

    Args:
        problems: Scalar texts, empty but for what went wrong on this rank.
        name: What the other ranks call it, too.

    Returns:
        Tensors to depend on in a graph, where they are what raises.

    Raises:
        tf.errors.InvalidArgumentError: "rank r: problem".
    """
    nothing = tf.zeros([0], tf.int64)
    return list(turns.exchange_notes(nothing, problems, communicator, name))


def all_or_none(function: Callable[[], Any] | None, communicator: Communicator) -> None:
    """Calls `function` unless it is None; an exception on one rank is a ValueError on all."""
    error = None
    try:
        if function is not None:
            function()
    except Exception as raised:
        error = raised
    if communicator.world_size == 1:
        if error is not None:
            raise error
        return
    try:
        problem = "" if error is None else str(error) or repr(error)
        raise_on_all([problem], communicator, "all_or_none")
    except tf.errors.InvalidArgumentError as told:
        # Without what TensorFlow writes around it: which op on which device.
        text = re.sub(r"^\{\{.*?\}\} | \[Op:.*$", "", told.message, flags=re.S)
        raise ValueError(text) from error


def in_turn(function: Callable[[], Any], communicator: Communicator, use_lock: bool) -> None:
    """Calls `function`, one rank at a time if `use_lock`."""
    if not use_lock:
        function()
        return
    for rank in range(communicator.world_size):
        # A rank that fails says so in its turn, so the others do not wait for it.
        all_or_none(function if rank == communicator.rank else None, communicator)
