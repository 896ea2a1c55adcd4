"""How ranks agree on what they do together, outside of training: eager only."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf

from sok_like.runtime.comm import Communicator


def send(block: np.ndarray, communicator: Communicator, all_ranks: bool) -> np.ndarray:
    """Flat blocks of all ranks in rank order, on rank 0 or on all."""
    if all_ranks:
        return communicator.all_gather(tf.constant(block), "dmp_get_weights").numpy()
    splits = [0] * communicator.world_size
    splits[0] = block.size
    received, _ = communicator.all_to_all(
        tf.constant(block), tf.constant(splits, tf.int32), "dmp_get_weights"
    )
    return received.numpy()


def gather_text(text: str, communicator: Communicator) -> str:
    """The ranks' texts, one behind the other."""
    data = tf.constant(np.frombuffer(text.encode(), np.uint8))
    return bytes(communicator.all_gather(data, "dmp_texts").numpy()).decode()


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
    told = gather_text("" if error is None else f"rank {communicator.rank}: {error}", communicator)
    if told:
        raise ValueError(told) from error


def in_turn(function: Callable[[], Any], communicator: Communicator, use_lock: bool) -> None:
    """Calls `function`, one rank at a time if `use_lock`."""
    if not use_lock:
        function()
        return
    for rank in range(communicator.world_size):
        # A rank that fails says so in its turn, so the others do not wait for it.
        all_or_none(function if rank == communicator.rank else None, communicator)
