"""One random state on all ranks, so that replicated values and the order of samples agree.

Keras draws seeds of initializers from Python's generator and shuffles by TensorFlow's; programs
make data by NumPy's. If the ranks have set the same seeds, nothing changes.
"""

from __future__ import annotations

import json
import random
import secrets

import numpy as np
import tensorflow as tf
from tensorflow.python.eager import context

from sok_like.runtime import comm, turns


def agree_on_random_state() -> None:
    """Gives all ranks the random state of rank 0. A collective."""
    communicator = comm.current()
    if communicator.world_size == 1:
        return
    seed = context.global_seed()
    if seed is None:
        seed = secrets.randbelow(2**31)
    sent = np.frombuffer(encoded(seed) if communicator.rank == 0 else b"", np.uint8)
    mine = tf.constant(sent)
    agreed = turns.collective_in_turn(communicator, "all_gather", mine, "sok_random_state")
    seed = set_encoded(agreed.numpy().tobytes())
    if context.global_seed() != seed:  # setting an equal seed would restart its sequence
        tf.random.set_seed(seed)


def encoded(seed: int) -> bytes:
    """The state of Python's and NumPy's generators and TensorFlow's seed, as JSON.

    Only numbers: bytes of another process must not become code, as pickled bytes can.
    """
    version, words, gauss = random.getstate()
    kind, key, *rest = np.random.get_state()
    state = {
        "python": [version, words, gauss],
        "numpy": [kind, np.asarray(key).tolist(), *rest],
        "seed": seed,
    }
    return json.dumps(state).encode()


def set_encoded(data: bytes) -> int:
    """Sets the generators; returns TensorFlow's seed."""
    state = json.loads(data)
    version, words, gauss = state["python"]
    random.setstate((version, tuple(words), gauss))
    kind, key, *rest = state["numpy"]
    np.random.set_state((kind, np.array(key, np.uint32), *rest))
    return state["seed"]
