"""The dtypes of rows: in a table, and (with their gradients) between ranks."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from sok_like.runtime.checks import wrong_argument

DTYPES = ("float32", "bfloat16", "float16")


def check(dtype: Any, where: str = "", argument: str = "wire_dtype") -> str | None:
    """The name of a dtype; None for None and float32. ValueError unless it is in `DTYPES`.

    `where` is its table, layer or lookup, and `argument` its name, for the error.
    """
    if dtype is None:
        return None
    name = None
    if not isinstance(dtype, int):  # TensorFlow would take it for the number of a dtype
        try:
            name = tf.as_dtype(dtype).name
        except (TypeError, ValueError):
            pass
    if name not in DTYPES:
        raise wrong_argument(argument, f"None or one of {DTYPES}", dtype, where)
    return None if name == "float32" else name
