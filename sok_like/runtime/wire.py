"""The dtypes that rows may have: in a table, and with their gradients between ranks."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

DTYPES = ("float32", "bfloat16", "float16")


def check(dtype: Any, where: str = "", argument: str = "wire_dtype") -> str | None:
    """The name of a dtype, or None for float32 and None; ValueError unless it is one of those.

    Args:
        dtype: A dtype of TensorFlow or NumPy, or its name.
        where: Which table, layer or lookup it is of, for the error.
        argument: As which it was given.
    """
    if dtype is None:
        return None
    name = None
    if not isinstance(dtype, int):  # TensorFlow would take it for a dtype's number
        try:
            name = tf.as_dtype(dtype).name
        except (TypeError, ValueError):
            pass
    if name not in DTYPES:
        raise ValueError(
            f"`{argument}` must be None or one of {DTYPES}. "
            f"Received: {argument}={dtype!r}{where and f' ({where})'}"
        )
    return None if name == "float32" else name
