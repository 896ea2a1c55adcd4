"""The dtype in which rows and gradients travel between ranks: the argument `wire_dtype`."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

WIRE_DTYPES = ("float32", "bfloat16", "float16")


def check(wire_dtype: Any, where: str = "") -> str | None:
    """The name of a dtype, or None for float32 and None; ValueError unless it is one of those.

    Args:
        wire_dtype: A dtype of TensorFlow or NumPy, or its name.
        where: Which layer or lookup it is of, for the error.
    """
    if wire_dtype is None:
        return None
    name = None
    if not isinstance(wire_dtype, int):  # TensorFlow would take it for a dtype's number
        try:
            name = tf.as_dtype(wire_dtype).name
        except (TypeError, ValueError):
            pass
    if name not in WIRE_DTYPES:
        raise ValueError(
            f"`wire_dtype` must be None or one of {WIRE_DTYPES}. "
            f"Received: wire_dtype={wire_dtype!r}{where and f' ({where})'}"
        )
    return None if name == "float32" else name
