"""The arguments of a table, checked together; options as JSON values, for configurations."""

import dataclasses
from typing import Any

import tensorflow as tf

from sok_like.runtime.checks import check_integer, require
from sok_like.runtime.ranks.lookup_options import check_row_dtype
from sok_like.table import policies
from sok_like.table.initializers import RowInitializer, row_initializer
from sok_like.table.keys import as_key_dtype
from sok_like.table.policies import EmbeddingVariableOption, InitializerOption


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

    def rows(self, world_size: int) -> RowInitializer:
        """How initial rows are drawn; ValueError unless rows of this dtype can hold them."""
        of, init = self.table, self.policies.init_option or InitializerOption()
        capacity = self.policies.capacity(self.capacity, self.name)
        rows = row_initializer(
            self.initializer if init.initializer is None else init.initializer,
            self.embedding_dim,
            capacity * world_size if capacity else None,
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
