"""Keys and rows: their legal dtypes in TensorFlow, and which rank owns a key."""

import contextlib
from typing import Any

import numpy as np
import tensorflow as tf

from sok_like.runtime.checks import unmet, wrong_argument
from sok_like.runtime.framework import hooks
from sok_like.runtime.framework.graphs import checked
from sok_like.runtime.framework.running_keras import is_keras_3
from sok_like.runtime.native import libraries
from sok_like.runtime.ranks import comm

DTYPES = (tf.int64, tf.int32, tf.uint64, tf.uint32)


def as_key_dtype(key_dtype: Any, table: str) -> tf.DType:
    """The dtype in which keys are exported."""
    dtype = None
    with contextlib.suppress(TypeError):
        dtype = tf.as_dtype(key_dtype)
    if key_dtype is None or dtype not in DTYPES:
        required = "int64, int32, uint64 or uint32"
        raise wrong_argument("key_dtype", required, key_dtype, f"table '{table}'")
    return dtype


# Keras 3 builds a loaded subclassed model by calling it with symbolic floats, whatever its inputs
# were. If that raises, Keras goes on and leaves weights of other layers out.
_keras_builds = hooks.Within()


def as_keys(keys: Any, argument: str = "keys") -> tf.Tensor:
    """Keys of any integer dtype as int64: signed ones by value, uint64 by its bits."""
    if isinstance(keys, (list, tuple)) and not keys:
        return tf.zeros([0], tf.int64)  # TensorFlow would take it for floats
    if keys is None or isinstance(keys, (tf.RaggedTensor, tf.SparseTensor)):
        raise wrong_argument(argument, "a dense tensor of integers", keys, error=TypeError)
    keys = _dense(keys, argument, "integers, of 64 bits at most")
    if keys.dtype == tf.int64:
        return keys
    if keys.dtype == tf.uint64:
        return tf.bitcast(keys, tf.int64)
    check_dtype(keys.dtype, argument)
    return tf.cast(keys, tf.int64)


def in_key_dtype(keys: tf.Tensor, variable: Any) -> tf.Tensor:
    """int64 keys of a table in its key dtype; InvalidArgumentError for one that does not fit."""
    dtype = variable.key_dtype
    if dtype.size == 8:
        return keys if dtype == tf.int64 else tf.bitcast(keys, dtype)
    named = tf.cast(keys, dtype)
    others = tf.boolean_mask(keys, tf.not_equal(tf.cast(named, tf.int64), keys))
    problem = f"Table '{variable.table_name}' has keys of {dtype.name}. Received: key"
    return checked(named, tf.equal(tf.size(others), 0), problem, others[:1])


def may_be_keys(dtype: tf.DType) -> bool:
    """Whether a dtype is one of keys, or stands for keys while Keras builds a model."""
    return dtype.is_integer or (dtype.is_floating and bool(_keras_builds))


def check_dtype(dtype: Any, argument: str = "keys") -> None:
    """Raises TypeError, with a remedy, unless keys may have this dtype."""
    dtype = tf.as_dtype(dtype)
    if not may_be_keys(dtype):
        what = "Keys" if argument == "keys" else f"`{argument}`"
        required = "be of an integer dtype"
        raise unmet(what, required, f"{dtype.name}. {dtype_hint(dtype)}", error=TypeError)


def dtype_hint(dtype: tf.DType) -> str:
    """How to make keys out of values whose dtype keys cannot have."""
    if dtype == tf.string:
        return (
            "(`sok.keys_of(strings)` turns strings into keys. So does, within a Keras model, "
            "`tf.keras.layers.Hashing(num_bins)` with a large num_bins, say 2**62.)"
        )
    return (
        "(A Keras model casts its inputs to float32, which cannot hold large keys, unless it "
        "starts with `tf.keras.Input(shape, dtype='int64')`.)"
    )


def keys_of(strings: Any) -> Any:
    """int64 keys of strings: the 64-bit FarmHash fingerprint of each string's bytes.

    `sok.GroupEmbedding` and columns of strings use the same. Text is encoded as UTF-8. The key is
    the same in every process and release. Two strings with one fingerprint share a row. Among n
    strings the chance that any two do is about n**2 / 2**65: 3e-8 for a million, 3% for a billion.

    Args:
        strings: Strings of any shape: a tensor, an array, a list, a RaggedTensor or a SparseTensor.

    Returns:
        int64 keys of the same shape and kind.

    Raises:
        TypeError: they are not strings. The fingerprint of a number is not that of its text.
    """
    if isinstance(strings, (tf.RaggedTensor, tf.SparseTensor)):
        return strings.with_values(keys_of(strings.values))
    try:
        strings = tf.convert_to_tensor(strings)
    except (TypeError, ValueError) as error:
        raise wrong_argument("strings", "strings", strings, error=TypeError) from error
    if strings.dtype != tf.string:
        raise wrong_argument("strings", "strings", strings.dtype, error=TypeError)
    # A program may save its graphs, or give them to processes that have TensorFlow only.
    return fingerprints(strings, stock=not tf.executing_eagerly())


def fingerprints(strings: tf.Tensor, stock: bool) -> tf.Tensor:
    """The keys of a tensor of strings. `stock`: by TensorFlow's op, which uses one thread."""
    if not stock:
        return libraries.ops().sok_fingerprints(strings=strings)
    data = tf.reshape(strings, [-1])
    bytes_ = tf.raw_ops.Fingerprint(data=data, method="farmhash64")  # [num_keys, 8]
    return tf.reshape(tf.bitcast(bytes_, tf.int64), tf.shape(strings))


def check_kind(table: Any, dtype: tf.DType, feature: str) -> None:
    """Notes whether a table's features are strings or integers; TypeError if it has had others."""
    if dtype.is_floating:  # see `_keras_builds`
        return
    kind = "strings" if dtype == tf.string else "integers"
    # A table that has been cleared may have either kind, and files do not keep it.
    first = table.__dict__.setdefault("_kind_of_features", kind)
    if kind != first:
        raise TypeError(
            f"All features of table '{table.table_name}' must be {first}, as its first one was. "
            "The string '1' and the integer 1 have different keys: convert one of them, or give "
            f"each a table of its own. Received: {kind} ({feature})"
        )


def as_rows(rows: Any, argument: str, table: str) -> tf.Tensor:
    """Rows, or gradients of rows, as float32."""
    rows = _dense(rows, argument, "real numbers", f"table '{table}'")
    if rows.dtype.is_floating or rows.dtype.is_integer:
        return tf.cast(rows, tf.float32)
    raise wrong_argument(argument, "real numbers", rows.dtype, f"table '{table}'", TypeError)


def _dense(values, argument, what, of=""):
    try:
        return tf.convert_to_tensor(values)
    except (TypeError, ValueError) as error:
        required = f"a dense tensor of {what}"
        raise wrong_argument(argument, required, values, of, TypeError) from error


def owner(keys: tf.Tensor, world_size: int) -> tf.Tensor:
    """Ranks that own int64 `keys`: `uint64(key) % world_size`, int64, the shape of `keys`."""
    # TensorFlow's floormod lacks a uint64 kernel in places: the sign bit is split off instead.
    low = tf.bitwise.bitwise_and(keys, tf.int64.max)
    high = tf.cast(keys < 0, tf.int64) * (2**63 % world_size)
    return tf.math.floormod(tf.math.floormod(low, world_size) + high, world_size)


def owners(keys: np.ndarray, world_size: int) -> np.ndarray:
    """`owner` in NumPy: the rank that owns each of the int64 `keys`, int64."""
    if world_size == 1:
        return np.zeros(len(keys), np.int64)
    unsigned = np.ascontiguousarray(keys).view(np.uint64)
    return (unsigned % np.uint64(world_size)).astype(np.int64)


def owned(keys: np.ndarray) -> np.ndarray:
    """Positions of the int64 `keys` that this rank owns."""
    communicator = comm.current()
    return np.flatnonzero(owners(keys, communicator.world_size) == communicator.rank)


def held_here(variable: Any, keys: tf.Tensor) -> tf.Tensor:
    """Which of the int64 `keys` `[num_keys]` belong to this rank, bool `[num_keys]`."""
    communicator = comm.current()
    if variable.home is not None:
        return tf.fill(tf.shape(keys), variable.home == communicator.rank)
    return tf.equal(owner(keys, communicator.world_size), communicator.rank)


@hooks.at_init
def _install():
    if is_keras_3():
        for name in ("_build_by_run_for_single_pos_arg", "_build_by_run_for_kwargs"):
            why = "symbolic floats stand for keys while Keras builds a model"
            hooks.wrap(tf.keras.layers.Layer, name, _keras_builds, why)
