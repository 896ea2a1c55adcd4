"""The arguments of a table, checked together, and how its initial rows are drawn.

A hash table has no shape to fill: its rows are created one by one. So a Keras initializer becomes a
distribution. Each element is drawn from it alone, as a pure function of (seed, table, key, column).
Constants, uniform, normal, truncated normal, and Keras' variance-scaling family are taken over
exactly. Any other initializer is called once for a matrix of 4096 rows (or
`InitializerOption.default_value_dim`), and key k starts from row k mod 4096.
"""

import dataclasses
import math
import os
import zlib
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from sok_like.runtime.checks import as_integer, check_integer, require, unmet, wrong_argument
from sok_like.runtime.ranks.comm import run_now
from sok_like.runtime.ranks.lookup_options import check_row_dtype
from sok_like.table import policies
from sok_like.table.keys import as_key_dtype
from sok_like.table.policies import DEFAULT_VALUE_DIM, EmbeddingVariableOption, InitializerOption

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


@dataclasses.dataclass
class TableOptions:
    """The arguments of `sok.EmbeddingVariable`, which describes them, in their plainest form."""

    embedding_dim: int
    name: str
    key_dtype: Any
    initializer: Any
    capacity: int | None
    use_hashtable: bool
    initial_capacity: int
    dtype: Any
    trainable: bool
    ev_option: EmbeddingVariableOption | None

    def __post_init__(self):
        of, name, capacity = self.table, self.name, self.capacity
        is_name = isinstance(name, str) and name != ""
        require(is_name, "name", "a string that is not empty", name, of)
        # TensorFlow's attributes and JSON do not accept NumPy's integers.
        self.embedding_dim = check_integer("embedding_dim", self.embedding_dim, of=of)
        self.capacity = policies.check_capacity(capacity, of)
        self.use_hashtable = bool(self.use_hashtable)
        fits = capacity is not None or self.use_hashtable
        require(fits, "capacity", "given if use_hashtable is False", capacity, of)
        initial = check_integer("initial_capacity", self.initial_capacity, 0, of)
        fits = capacity is None or initial <= capacity
        require(fits, "initial_capacity", f"at most `capacity`, {capacity}", initial, of)
        self.initial_capacity = initial
        self.key_dtype = as_key_dtype(self.key_dtype, name).name
        self.dtype = check_row_dtype(self.dtype, of, "dtype") or "float32"
        policies.check_option("ev_option", self.ev_option, EmbeddingVariableOption, of=of)

    @property
    def table(self) -> str:
        """Which table it is, in errors."""
        return f"table '{self.name}'"

    @property
    def policies(self) -> EmbeddingVariableOption:
        """Its policies; without effect if it has none."""
        return self.ev_option or EmbeddingVariableOption()

    @property
    def limit(self) -> int | None:
        """Maximum number of keys per rank, from the variable or from ScoreEvict; None: no limit."""
        evictions = self.policies.evictions
        score = next((e for e in evictions if isinstance(e, policies.ScoreEvict)), None)
        if score is None:
            return self.capacity
        fits = self.capacity is None or score.capacity in (None, self.capacity)
        required = f"that of ScoreEvict, {score.capacity}, or None"
        require(fits, "capacity", required, self.capacity, self.table)
        limit = score.capacity if self.capacity is None else self.capacity
        if limit is None:
            raise ValueError(
                "ScoreEvict needs a capacity, its own or the variable's: without one nothing is "
                f"evicted. Received: None ({self.table})"
            )
        return limit

    def rows(self, world_size: int) -> RowInitializer:
        """How initial rows are drawn; ValueError unless rows of this dtype can hold them."""
        limit, of, init = self.limit, self.table, self.policies.init_option or InitializerOption()
        rows = row_initializer(
            self.initializer if init.initializer is None else init.initializer,
            self.embedding_dim,
            limit * world_size if limit else None,
            init.default_value_dim,
        )
        fits = self.dtype == "float32" or self.embedding_dim <= 4096
        required = "at most 4096 if rows have 16 bits"
        require(fits, "embedding_dim", required, self.embedding_dim, of)
        if self.dtype == "float16":
            largest = max(map(abs, (rows.a, rows.b, *rows.default_rows)))
            required = "within [-65504, 65504], the range of float16"
            require(largest <= 65504, "initializer", required, largest, of)
        return rows

    def attributes(self, rows: RowInitializer) -> dict[str, Any]:
        """Attributes of the op that makes a table."""
        option = self.policies
        admission, storage = option.filter_option, option.storage_option
        attributes: dict[str, Any] = {
            "table_name": self.name,
            "dim": self.embedding_dim,
            "key_type": self.key_dtype,
            "row_type": self.dtype,
            "initial_capacity": self.initial_capacity,
            "max_capacity": self.limit or 0,
            "use_hashtable": self.use_hashtable,
            "initializer": rows.kind,
            "initializer_a": rows.a,
            "initializer_b": rows.b,
            "initializer_seed": rows.seed,
            "default_rows": rows.default_rows,
            "record": option.keeps_records,  # also for a policy without effect (filter_freq=1)
            "count_occurrences": option.counts_occurrences,
            "evicted_buffer": option.evicted_buffer_size,
        }
        if admission is not None:
            attributes["filter_freq"] = admission.filter_freq
        if isinstance(admission, policies.CounterFilter):
            attributes["max_waiting"] = admission.max_waiting or self.limit or 0
        if isinstance(admission, policies.CBFFilter) and admission.filter_freq > 1:
            attributes["bloom_max_keys"] = admission.max_element_size
            attributes["bloom_probability"] = admission.false_positive_probability
            attributes["bloom_counter_bits"] = admission.counter_bits
        if option.init_option is not None:
            attributes["no_permission"] = option.init_option.default_value_no_permission
        for eviction in option.evictions:
            if isinstance(eviction, policies.GlobalStepEvict):
                attributes["steps_to_live"] = eviction.steps_to_live or 0
            elif isinstance(eviction, policies.L2WeightEvict):
                attributes["l2_threshold"] = eviction.l2_weight_threshold
            elif isinstance(eviction, policies.ScoreEvict):
                attributes["score"] = eviction.score
        if storage is not None and storage.storage_path is not None:  # on disk
            # Absolute: the file is made again when slot rows are added or content is replaced.
            attributes["storage_path"] = os.path.abspath(storage.storage_path)
            sizes = (*storage.storage_size, 0)
            attributes |= {"storage_memory": sizes[0], "storage_file": sizes[1]}
            attributes["storage_lfu"] = storage.cache_strategy != "LRU"
        return attributes


def option_config(option: Any) -> Any:
    """An option as JSON values, nested options likewise; Keras serializes initializers."""
    if isinstance(option, (list, tuple)):
        return [option_config(item) for item in option]
    if not dataclasses.is_dataclass(option):
        return option
    fields = {f.name: option_config(getattr(option, f.name)) for f in dataclasses.fields(option)}
    if isinstance(option, policies.InitializerOption) and option.initializer is not None:
        initializer = tf.keras.initializers.get(option.initializer)
        fields["initializer"] = tf.keras.initializers.serialize(initializer)
    return {"option": type(option).__name__, **fields}


def option_from_config(config: Any) -> Any:
    """The inverse of `option_config`; returns an option unchanged."""
    if isinstance(config, list):
        return [option_from_config(item) for item in config]
    if not isinstance(config, dict) or "option" not in config:
        return config
    fields = {name: option_from_config(value) for name, value in config.items() if name != "option"}
    if isinstance(fields.get("initializer"), dict):
        fields["initializer"] = tf.keras.initializers.deserialize(fields["initializer"])
    return getattr(policies, config["option"])(**fields)


def row_initializer(
    initializer: Any, dim: int, num_rows: int | None, num_default_rows: int = DEFAULT_VALUE_DIM
) -> RowInitializer:
    """Translates a Keras initializer: a name, an instance or a class, also of `tf.compat.v1`.

    Or a callable `(shape, dtype) -> tensor`, which must return the same on all ranks. `dim` and
    `num_rows` of the whole table (None: `dim` instead) are the fans of the variance-scaling family.
    A RowInitializer is returned unchanged.
    """
    if isinstance(initializer, RowInitializer):
        return initializer
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
    known = type(instance).__module__.startswith(_KNOWN_MODULES)
    if known and num_default_rows == DEFAULT_VALUE_DIM:
        rows = _distribution(instance, config, dim, num_rows)
        if rows is not None:
            _check_finite(instance, (rows.a, rows.b, *rows.default_rows))
            return rows._replace(seed=seed)
    return RowInitializer(
        "default_rows", default_rows=_default_rows(instance, config, num_default_rows, dim)
    )


def _check_finite(instance, numbers):
    if not np.isfinite(np.asarray(numbers, np.float32)).all():
        required = "give finite numbers that float32 can hold"
        raise unmet("`initializer`", required, f"NaN or infinite ones from {instance!r}")


def _distribution(instance, config, dim, num_rows):
    """That of each element of a stock initializer; None if its elements are not alike."""
    match type(instance).__name__:
        case "Zeros":
            return RowInitializer("constant", 0.0)
        case "Ones":
            return RowInitializer("constant", 1.0)
        case "Constant":
            return _constant(config["value"], dim)
        case "RandomUniform":
            limit = config["maxval"]
            limit = 1.0 if limit is None else float(limit)  # None: TF1's default
            return RowInitializer("uniform", float(config["minval"]), limit)
        case "RandomNormal":
            return RowInitializer("normal", float(config["mean"]), float(config["stddev"]))
        case "TruncatedNormal":
            mean, stddev = float(config["mean"]), float(config["stddev"])
            return RowInitializer("truncated_normal", mean, stddev)
    if not hasattr(instance, "distribution"):  # which the variance-scaling family has
        return None
    fan_in, fan_out = float(num_rows or dim), float(dim)
    fans = {"fan_in": fan_in, "fan_out": fan_out, "fan_avg": (fan_in + fan_out) / 2}
    variance = instance.scale / max(1.0, fans[instance.mode])
    if instance.distribution == "uniform":
        limit = math.sqrt(3 * variance)
        return RowInitializer("uniform", -limit, limit)
    if instance.distribution == "untruncated_normal":
        return RowInitializer("normal", 0.0, math.sqrt(variance))
    return RowInitializer("truncated_normal", 0.0, math.sqrt(variance) / _TRUNCATED_STDDEV)


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
