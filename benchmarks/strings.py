"""Strings to keys, against Keras' Hashing, which gives positions of an array instead."""

from __future__ import annotations

import numpy as np
import tensorflow as tf

import sok_like as sok
from benchmarks.harness import Contender, Match
from benchmarks.steps import OURS, cycle

HASHING = "Keras Hashing"


def strings(quick: bool) -> tuple[dict[str, Contender], list[Match]]:
    """26 features of 8,192 strings, of 1 to 30 bytes."""
    random = np.random.default_rng(6)
    num_strings = 26 * (512 if quick else 8192)
    numbers = random.integers(0, 10**9, [4, num_strings])
    lengths = random.integers(1, 31, [4, num_strings])
    batches = [
        (tf.constant([f"{number:030d}"[-length:] for number, length in zip(*row, strict=True)]),)
        for row in zip(numbers, lengths, strict=True)
    ]
    hashing = tf.function(tf.keras.layers.Hashing(2**62))
    contenders = {
        OURS: Contender(cycle(sok.keys_of, batches)),
        HASHING: Contender(cycle(hashing, batches)),
    }
    return contenders, [Match("strings to keys", OURS, HASHING, 1.0)]
