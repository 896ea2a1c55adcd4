"""The random state that ranks agree on travels as numbers, and comes back to the bit."""

import json
import random

import numpy as np
import tensorflow as tf

from sok_like.distribution.distributions import random_state, set_random_state


def draws():
    return [random.random(), random.gauss(0, 1), np.random.rand(), np.random.randn()]


def test_the_state_comes_back_to_the_bit():
    random.gauss(0, 1), np.random.randn()  # half of a pair is kept for the next call
    tf.random.set_seed(41)
    data = json.dumps(random_state())  # nothing else travels
    expected = [*draws(), float(tf.random.uniform([]))]
    random.seed(1), np.random.seed(1), tf.random.set_seed(1)
    set_random_state(json.loads(data))
    assert [*draws(), float(tf.random.uniform([]))] == expected


def test_an_equal_seed_does_not_restart_the_generators_of_tensorflow():
    tf.random.set_seed(41)
    first = float(tf.random.uniform([]))
    set_random_state(random_state())
    assert float(tf.random.uniform([])) != first
