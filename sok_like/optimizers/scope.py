"""`sok.OptimizerScope`: kept for programs that were written with it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any


@contextlib.contextmanager
def OptimizerScope(trainable_variables: Sequence[Any]) -> Iterator[None]:
    """Does nothing: an optimizer of this package finds embedding variables by itself.

    SOK 1.x needed the scope around `apply_gradients` of a stock optimizer. Here a stock optimizer
    raises, inside the scope as outside, and names `sok.OptimizerWrapper`.

    Args:
        trainable_variables: Ignored.
    """
    del trainable_variables
    yield
