"""Which keys get a row, which lose it, and where rows start: the options of an EmbeddingVariable.

DeepRec's names, checked when they are made, so that a slip is found where it was written. They say
what is wanted and do nothing; the policies themselves are the core's (`cpp/core/policy.h`).
"""

from __future__ import annotations

import dataclasses
from typing import Any

from sok_like.runtime.checks import as_integer

DEFAULT_VALUE_DIM = 4096
COUNTER_TYPES = ("uint8", "uint16", "uint32", "uint64")
SCORES = ("lru", "lfu", "custom")
STORAGE_TYPES = ("DRAM", "HBM")


def _require(ok: bool, argument: str, required: str, received: Any) -> None:
    if not ok:
        raise ValueError(f"`{argument}` must be {required}. Received: {argument}={received!r}")


def _is_int(value: Any, least: int) -> bool:
    integer = as_integer(value)
    return integer is not None and integer >= least


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


# ---- admission ----


@dataclasses.dataclass(frozen=True)
class CounterFilter:
    """A key gets its row in the training lookup that is the `filter_freq`-th to contain it.

    Until then it reads `InitializerOption.default_value_no_permission` and its gradient is dropped.
    Counts are exact; a key that waits takes 40 to 70 bytes.

    Args:
        filter_freq: Lookups; 0 and 1 filter nothing.

    Raises:
        ValueError: `filter_freq` is no integer >= 0.
    """

    filter_freq: int = 0

    def __post_init__(self):
        _require(_is_int(self.filter_freq, 0), "filter_freq", "an integer >= 0", self.filter_freq)


@dataclasses.dataclass(frozen=True)
class CBFFilter:
    """`CounterFilter` with a counting Bloom filter: memory that does not grow, counts never short.

    With n = `max_element_size` waiting keys the filter has m = -n ln(p) / ln(2)^2 counters, of
    which k = m / n ln(2) belong to a key (Fan et al., Summary Cache, 2000; the sizes are those of
    Bloom's filter). A key counts as seen as often as its least counter says: too often with
    probability p = `false_positive_probability`, too seldom never.

    Args:
        filter_freq: Lookups; 0 and 1 filter nothing.
        max_element_size: Keys that may wait, in the whole table; each rank has a filter of this
            size, so that a dump can be restored on any number of ranks.
        false_positive_probability: In (0, 1).
        counter_type: Width of a counter: uint8, uint16, uint32 or uint64, or a tf.DType of that
            name. Counters stop at their largest value.

    Raises:
        ValueError: an argument that is none of these.
    """

    filter_freq: int = 0
    max_element_size: int = 0
    false_positive_probability: float = -1.0
    counter_type: Any = "uint64"

    def __post_init__(self):
        name = getattr(self.counter_type, "name", self.counter_type)
        _require(name in COUNTER_TYPES, "counter_type", f"one of {COUNTER_TYPES}", name)
        object.__setattr__(self, "counter_type", name)
        largest = 2 ** int(name.removeprefix("uint")) - 1
        _require(
            _is_int(self.filter_freq, 0) and self.filter_freq <= min(largest, 2**63 - 1),
            "filter_freq",
            f"an integer in [0, {largest}], what a {name} can count to",
            self.filter_freq,
        )
        if self.filter_freq <= 1:
            return
        _require(
            _is_int(self.max_element_size, 1),
            "max_element_size",
            "a positive integer (CounterFilter counts without a bound)",
            self.max_element_size,
        )
        p = self.false_positive_probability
        _require(_is_number(p) and 0 < p < 1, "false_positive_probability", "a number in (0, 1)", p)


# ---- eviction ----


@dataclasses.dataclass(frozen=True)
class GlobalStepEvict:
    """`evict()`, and a dump, remove keys no training lookup contained for `steps_to_live` steps.

    Args:
        steps_to_live: A key seen in step s goes once the table's step is beyond s + steps_to_live.
            None: never.

    Raises:
        ValueError: `steps_to_live` is neither None nor a positive integer.
    """

    steps_to_live: int | None = None

    def __post_init__(self):
        value = self.steps_to_live
        _require(
            value is None or (_is_int(value, 1) and value < 2**63),
            "steps_to_live",
            "None or a positive integer",
            value,
        )


@dataclasses.dataclass(frozen=True)
class L2WeightEvict:
    """`evict()`, and a dump, remove keys whose row w has sum(w^2) / 2 below a threshold.

    Args:
        l2_weight_threshold: A positive number; -1 evicts nothing. Half the sum of squares, as
            `tf.nn.l2_loss` has it.

    Raises:
        ValueError: `l2_weight_threshold` is neither -1 nor a positive number.
    """

    l2_weight_threshold: float = -1.0

    def __post_init__(self):
        value = self.l2_weight_threshold
        _require(
            _is_number(value) and (value == -1.0 or 0 < value < float("inf")),
            "l2_weight_threshold",
            "-1 or a positive number",
            value,
        )


@dataclasses.dataclass(frozen=True)
class ScoreEvict:
    """A full table makes room for new keys by evicting those of least score.

    Of equal scores the lower key goes first, as unsigned numbers. Keys of the lookup that needs the
    room stay; if those alone are too many, it is a `tf.errors.ResourceExhaustedError`.

    Args:
        score: "lru": the step of the last training lookup that contained the key. "lfu": how many
            did. "custom": what `variable.assign_scores` said, 0 until then.
        capacity: Most keys a rank may hold; None where the variable is given its capacity.

    Raises:
        ValueError: an argument that is none of these.
    """

    score: str = "lru"
    capacity: int | None = None

    def __post_init__(self):
        _require(self.score in SCORES, "score", f"one of {SCORES}", self.score)
        _require(
            self.capacity is None or (_is_int(self.capacity, 1) and self.capacity < 2**32 - 1),
            "capacity",
            "None or an integer in [1, 2**32 - 1)",
            self.capacity,
        )


EVICTIONS = (GlobalStepEvict, L2WeightEvict, ScoreEvict)

# ---- the rest ----


@dataclasses.dataclass(frozen=True)
class InitializerOption:
    """Where rows start.

    Args:
        initializer: Keras initializer or its name; None leaves it to the variable's argument.
        default_value_dim: Rows of the matrix that an initializer which is not element by element is
            asked for; key k starts from row `uint64(k) % default_value_dim`. Another number than
            4096 makes a matrix of that many rows of any initializer.
        default_value_no_permission: What every element of a row reads as while a filter keeps its
            key waiting.

    Raises:
        ValueError: an argument out of its range.
    """

    initializer: Any = None
    default_value_dim: int = DEFAULT_VALUE_DIM
    default_value_no_permission: float = 0.0

    def __post_init__(self):
        rows, value = self.default_value_dim, self.default_value_no_permission
        _require(_is_int(rows, 1), "default_value_dim", "a positive integer", rows)
        finite = _is_number(value) and abs(value) < float("inf")
        _require(finite, "default_value_no_permission", "a finite number", value)


@dataclasses.dataclass(frozen=True)
class StorageOption:
    """Where DeepRec would put rows; here they are in the memory of the table's device.

    Args:
        storage_type: None, "DRAM" or "HBM", or an enum member of that name.
        storage_path, storage_size, cache_strategy: None; there are no other tiers to describe.

    Raises:
        ValueError: a storage type or a tier that does not exist here.
    """

    storage_type: Any = None
    storage_path: str | None = None
    storage_size: Any = None
    cache_strategy: Any = None

    def __post_init__(self):
        name = getattr(self.storage_type, "name", self.storage_type)
        _require(
            name is None or name in STORAGE_TYPES,
            "storage_type",
            f"None or one of {STORAGE_TYPES}: rows live in one memory",
            self.storage_type,
        )
        object.__setattr__(self, "storage_type", name)
        for argument in ("storage_path", "storage_size", "cache_strategy"):
            value = getattr(self, argument)
            _require(value is None, argument, "None: rows live in one memory", value)


@dataclasses.dataclass(frozen=True)
class EmbeddingVariableOption:
    """Policies and settings of an EmbeddingVariable.

    Args:
        ht_type, ht_partition_num: DeepRec's kind and parts of its hash table; without effect.
        evict_option: GlobalStepEvict, L2WeightEvict or ScoreEvict; or a list with at most one of
            each.
        ckpt: None: rows are read back by `sok.Saver`.
        filter_option: CounterFilter or CBFFilter.
        storage_option: StorageOption.
        init_option: InitializerOption.
        evicted_buffer_size: Evicted rows a rank keeps for `variable.pop_evicted()`. Those beyond it
            are counted only, the oldest first.
        record_statistics: Keep frequencies, steps and counts also where no policy needs them.

    Raises:
        ValueError: a number out of range, or an argument that would be ignored.
        TypeError: an option of the wrong class.
    """

    ht_type: str = ""
    ht_partition_num: int = 1000
    evict_option: Any = None
    ckpt: Any = None
    filter_option: CounterFilter | CBFFilter | None = None
    storage_option: StorageOption | None = None
    init_option: InitializerOption | None = None
    evicted_buffer_size: int = dataclasses.field(default=0, kw_only=True)
    record_statistics: bool = dataclasses.field(default=False, kw_only=True)

    def __post_init__(self):
        several = isinstance(self.evict_option, (list, tuple))
        evictions = tuple(self.evict_option) if several else (self.evict_option,)
        object.__setattr__(self, "evict_option", evictions if several else self.evict_option)
        for eviction in evictions:
            _check_class("evict_option", eviction, EVICTIONS)
        kinds = [type(eviction).__name__ for eviction in evictions]
        _require(
            len(set(kinds)) == len(kinds), "evict_option", "at most one policy of a kind", kinds
        )
        _check_class("filter_option", self.filter_option, (CounterFilter, CBFFilter))
        _check_class("storage_option", self.storage_option, (StorageOption,))
        _check_class("init_option", self.init_option, (InitializerOption,))
        _require(self.ckpt is None, "ckpt", "None; sok.Saver reads tables back", self.ckpt)
        size = self.evicted_buffer_size
        _require(_is_int(size, 0), "evicted_buffer_size", "an integer >= 0", size)
        recorded = self.record_statistics
        _require(isinstance(recorded, bool), "record_statistics", "a bool", recorded)
        if size > 0 and not any(self.evictions):
            raise ValueError(
                "`evicted_buffer_size` needs an `evict_option`: without one nothing is evicted. "
                f"Received: evicted_buffer_size={size}"
            )

    @property
    def evictions(self) -> tuple:
        """`evict_option` as a tuple, which may be empty."""
        option = self.evict_option
        return option if isinstance(option, tuple) else (option,) if option is not None else ()

    @property
    def keeps_records(self) -> bool:
        """Whether the table keeps a record a key: only where something asks for it."""
        return self.filter_option is not None or bool(self.evictions) or self.record_statistics

    def attributes(self) -> dict[str, Any]:
        """The policies as attributes of the table op."""
        # A policy that is there and does nothing (filter_freq=1) still records.
        found: dict[str, Any] = {"record": self.keeps_records}
        if self.filter_option is not None:
            found["filter_freq"] = self.filter_option.filter_freq
        if isinstance(self.filter_option, CBFFilter) and self.filter_option.filter_freq > 1:
            found["bloom_max_keys"] = self.filter_option.max_element_size
            found["bloom_probability"] = self.filter_option.false_positive_probability
            found["bloom_counter_bits"] = int(self.filter_option.counter_type.removeprefix("uint"))
        if self.init_option is not None:
            found["no_permission"] = self.init_option.default_value_no_permission
        for eviction in self.evictions:
            if isinstance(eviction, GlobalStepEvict):
                found["steps_to_live"] = eviction.steps_to_live or 0
            elif isinstance(eviction, L2WeightEvict):
                found["l2_threshold"] = eviction.l2_weight_threshold
            elif isinstance(eviction, ScoreEvict):
                found["score"] = eviction.score
        found["evicted_buffer"] = self.evicted_buffer_size
        return found

    def capacity(self, given: int | None, table: str) -> int | None:
        """Most keys a rank may hold, said by the variable, by ScoreEvict, or by neither.

        Raises:
            ValueError: they disagree, or there is eviction by score without a capacity.
        """
        score = next((e for e in self.evictions if isinstance(e, ScoreEvict)), None)
        if score is None:
            return given
        if given is not None and score.capacity not in (None, given):
            raise ValueError(
                f"`capacity` must be that of ScoreEvict, {score.capacity}, or None. "
                f"Received: capacity={given} (table '{table}')"
            )
        if given is None and score.capacity is None:
            raise ValueError(
                "ScoreEvict needs a capacity, its own or the variable's: without one nothing is "
                f"evicted. Received: None (table '{table}')"
            )
        return given if given is not None else score.capacity


def _check_class(argument, value, classes):
    if value is not None and not isinstance(value, classes):
        names = " or ".join(f"sok.{c.__name__}" for c in classes)
        raise TypeError(f"`{argument}` must be {names}. Received: {value!r}")
