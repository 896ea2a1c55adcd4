"""One random state on all ranks, so that replicated values and the order of samples agree.

Keras draws the seeds of initializers from Python's generator and shuffles by TensorFlow's; programs
make data by NumPy's. Nothing changes if the ranks have set the same seeds.
"""

from __future__ import annotations

import pickle
import random
import secrets

import numpy as np
import tensorflow as tf
from tensorflow.python.eager import context

from sok_like.runtime import comm


def agree_on_random_state() -> None:
    """Gives all ranks the random state of rank 0. A collective."""
    communicator = comm.current()
    if communicator.world_size == 1:
        return
    seed = context.global_seed()
    if seed is None:
        seed = secrets.randbelow(2**31)
    mine = pickle.dumps((random.getstate(), np.random.get_state(), seed))
    sent = np.frombuffer(mine if communicator.rank == 0 else b"", np.uint8)
    agreed = communicator.all_gather(tf.constant(sent), "sok_random_state").numpy().tobytes()
    python_state, numpy_state, seed = pickle.loads(agreed)
    random.setstate(python_state)
    np.random.set_state(numpy_state)
    if context.global_seed() != seed:  # setting it would restart its sequence
        tf.random.set_seed(seed)
