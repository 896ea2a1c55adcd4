"""Translates Keras initializers into what the core draws initial rows from.

A hash table has no shape to fill: its rows are created one by one. So an initializer becomes a
distribution. Each element is drawn from it alone, as a pure function of (seed, table, key, column).
Constants, uniform, normal, truncated normal, and Keras' variance-scaling family are taken over
exactly. Any other initializer is called once for a matrix of 4096 rows (or
`InitializerOption.default_value_dim`), and key k starts from row k mod 4096.
"""

import math
import zlib
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from sok_like.runtime.checks import as_integer, unmet, wrong_argument
from sok_like.runtime.ranks.comm import run_now
from sok_like.table.policies import DEFAULT_VALUE_DIM

# Modules of the initializers that are named below; those of tf.compat.v1 are in init_ops.
_KNOWN_MODULES = ("keras.", "tf_keras.", "tensorflow.python.ops.init_ops")

# The standard deviation of a standard normal distribution cut at two standard deviations. Keras
# divides by it to reach the requested variance (keras.initializers.VarianceScaling).
_TRUNCATED_STDDEV = 0.87962566103423978


class RowInitializer(NamedTuple):
    """Arguments of the table op: a distribution and its two parameters, or default rows."""

    kind: str  # "constant", "uniform", "normal", "truncated_normal", "default_rows"
    a: float = 0.0
    b: float = 0.0
    seed: int = 0  # distinguishes initializers of the same kind
    default_rows: tuple[float, ...] = ()  # [num_default_rows * dim]

    def __str__(self):
        """What ranks compare. Not the default rows, whose last bits may depend on the processor."""
        seed = f" seed {self.seed}" if self.seed else ""
        return f"{self.kind} {self.a:g} {self.b:g}{seed}"


def row_initializer(
    initializer: Any, dim: int, num_rows: int | None, num_default_rows: int = DEFAULT_VALUE_DIM
) -> RowInitializer:
    """Translates a Keras initializer: a name, an instance or a class, also of `tf.compat.v1`.

    Or a callable `(shape, dtype) -> tensor`, which must return the same on all ranks. `dim` and
    `num_rows` of the whole table (None: `dim` instead) are the fans of the variance-scaling family.
    """
    instance = tf.keras.initializers.get(initializer)
    if instance is None:
        raise wrong_argument("initializer", "a Keras initializer or its name", None)
    if isinstance(instance, type):
        instance = instance()
    config = instance.get_config() if hasattr(instance, "get_config") else {}
    seed = config.get("seed")
    if isinstance(seed, dict):  # a SeedGenerator of Keras 3
        seed = seed.get("config", {}).get("seed")
    seed = as_integer(seed) or 0
    if not -(2**63) <= seed < 2**63:
        raise ValueError(f"The seed of an initializer must fit int64. Received: seed={seed!r}")
    translate = _TRANSLATIONS.get(type(instance).__name__)
    if translate is None and isinstance(instance, tf.keras.initializers.VarianceScaling):
        translate = _variance_scaling
    element_wise = num_default_rows == DEFAULT_VALUE_DIM
    known = type(instance).__module__.startswith(_KNOWN_MODULES)
    if translate is not None and element_wise and known:
        rows = translate(config, dim, num_rows)._replace(seed=seed)
        _check_finite(instance, (rows.a, rows.b, *rows.default_rows))
        return rows
    return RowInitializer(
        "default_rows", default_rows=_default_rows(instance, config, num_default_rows, dim)
    )


def _check_finite(instance, numbers):
    if not np.isfinite(np.asarray(numbers, np.float32)).all():
        required = "give finite numbers that float32 can hold"
        raise unmet("`initializer`", required, f"NaN or infinite ones from {instance!r}")


def _variance_scaling(config, dim, num_rows):
    config = {"scale": 1.0, "mode": "fan_in", "distribution": "truncated_normal", **config}
    fan_in, fan_out = float(num_rows or dim), float(dim)
    fans = {"fan_in": fan_in, "fan_out": fan_out, "fan_avg": (fan_in + fan_out) / 2}
    variance = config["scale"] / max(1.0, fans[config["mode"]])
    if config["distribution"] == "uniform":
        limit = math.sqrt(3 * variance)
        return RowInitializer("uniform", -limit, limit)
    if config["distribution"] == "untruncated_normal":
        return RowInitializer("normal", 0.0, math.sqrt(variance))
    return RowInitializer("truncated_normal", 0.0, math.sqrt(variance) / _TRUNCATED_STDDEV)


def _scaled(scale, mode, distribution):
    # The named members of the family do not keep these three in their config.
    config = {"scale": scale, "mode": mode, "distribution": distribution}
    return lambda _, dim, num_rows: _variance_scaling(config, dim, num_rows)


def _normal(kind):
    return lambda config, *_: RowInitializer(kind, float(config["mean"]), float(config["stddev"]))


_TRANSLATIONS: dict[str, Callable] = {
    "Zeros": lambda config, dim, num_rows: RowInitializer("constant", 0.0),
    "Ones": lambda config, dim, num_rows: RowInitializer("constant", 1.0),
    "Constant": lambda config, dim, num_rows: _constant(config["value"], dim),
    "RandomUniform": lambda config, dim, num_rows: RowInitializer(
        "uniform",
        float(config["minval"]),
        1.0 if config["maxval"] is None else float(config["maxval"]),  # None: TF1's default
    ),
    "RandomNormal": _normal("normal"),
    "TruncatedNormal": _normal("truncated_normal"),
    "VarianceScaling": _variance_scaling,
    "GlorotUniform": _scaled(1.0, "fan_avg", "uniform"),
    "GlorotNormal": _scaled(1.0, "fan_avg", "truncated_normal"),
    "HeUniform": _scaled(2.0, "fan_in", "uniform"),
    "HeNormal": _scaled(2.0, "fan_in", "truncated_normal"),
    "LecunUniform": _scaled(1.0, "fan_in", "uniform"),
    "LecunNormal": _scaled(1.0, "fan_in", "truncated_normal"),
}


def _constant(value, dim):
    if isinstance(value, dict):  # the form in which Keras 3 writes an array
        value = value["config"]["value"]
    value = np.asarray(value, np.float32)
    if value.size == 1:
        return RowInitializer("constant", float(value.reshape(())))
    if value.size != dim:
        raise ValueError(
            f"A Constant initializer must hold one number, or a row of {dim} that every key starts "
            "with; rows that were trained elsewhere are set by `sok.assign(variable, keys, rows)`. "
            f"Received: a value of shape {value.shape}"
        )
    # A constant row: the same for every key.
    return RowInitializer("default_rows", default_rows=tuple(value.reshape([dim]).tolist()))


def _default_rows(instance, config, num_rows, dim):
    if config.get("seed", 0) is None:
        # Keras would draw another seed in each process, but ranks must agree.
        name = f"{type(instance).__module__}.{type(instance).__qualname__}"
        instance = type(instance).from_config({**config, "seed": zlib.crc32(name.encode())})
    shape = (num_rows, dim)
    (rows,) = run_now(lambda: [tf.convert_to_tensor(instance(shape, dtype="float32"))])
    if rows.shape != shape:
        required = f"return the shape it is asked for, {shape}"
        raise unmet("An initializer", required, f"{rows.shape} from {instance!r}")
    if rows.dtype.kind not in "fiu" and rows.dtype != tf.bfloat16.as_numpy_dtype:
        raise unmet("An initializer", "return real numbers", f"{rows.dtype} from {instance!r}")
    _check_finite(instance, rows)
    return tuple(np.asarray(rows, np.float32).ravel().tolist())
