"""DeepRec's functions that make tables, and its switch for several processes.

    get_embedding_variable    a hash table by its full name: the variable scope's and its own
    get_multihash_variable    id -> (id // rows of the first table, id % rows of the second) -> rows
                              -> added, multiplied or concatenated: two small dense tables

In a graph, hash tables belong to the graph, eagerly to what `sok.Init` set up. Asking again returns
the same table.

(Multihash: H.-J. M. Shi et al., "Compositional embeddings using complementary partitions", 2020.
There both divisions use the same number. No two ids share both rows if the second table has at
least as many rows as the first.)
"""

import dataclasses
from typing import Any

import tensorflow as tf

from sok_like.lookup import by_key as by_key  # makes its tables readable by key
from sok_like.lookup.by_key import OnTypeError
from sok_like.runtime.checks import as_integer, require, unmet
from sok_like.runtime.framework.graphs import checked
from sok_like.runtime.ranks import comm, horovod
from sok_like.runtime.ranks.initialize import ensure_initialized
from sok_like.runtime.ranks.lookup_options import check_row_dtype
from sok_like.table import policies
from sok_like.table.keys import as_key_dtype
from sok_like.table.policies import EmbeddingVariableOption, InitializerOption
from sok_like.table.variable import EmbeddingVariable

v1 = tf.compat.v1
OPERATIONS = ("add", "mul", "mult", "concat")


def get_embedding_variable(
    name: str,
    embedding_dim: int,
    key_dtype: Any = tf.int64,
    value_dtype: Any = None,
    initializer: Any = None,
    regularizer: Any = None,
    trainable: bool = True,
    collections: Any = None,
    caching_device: Any = None,
    partitioner: Any = None,
    validate_shape: bool = True,
    custom_getter: Any = None,
    constraint: Any = None,
    init_data_source: Any = None,
    ev_option: EmbeddingVariableOption | None = None,
    *,
    steps_to_live: int | None = None,
    capacity: int | None = None,
) -> EmbeddingVariable:
    """The table of this name: the first call makes it, later calls return it.

    Within `tf.compat.v1.variable_scope` the name begins with the scope's. A scope with `reuse=True`
    returns existing tables only.

    Args:
        name, embedding_dim, key_dtype, trainable, capacity: As in `sok.EmbeddingVariable`.
        value_dtype: Its `dtype`: None or float32, bfloat16 or float16.
        initializer: Keras initializer or its name. That of `ev_option.init_option` replaces it, as
            in DeepRec. None: the variable scope's, or else "random_uniform" (-0.05 to 0.05).
        regularizer, constraint, custom_getter, init_data_source: Must be None, also in the variable
            scope: a hash table has no dense value for them.
        collections: In a graph, further collections for the table; must include GLOBAL_VARIABLES,
            to which it always belongs.
        caching_device, partitioner, validate_shape: Ignored: a table is spread over all ranks, read
            in place, and has no shape to validate. With a partitioner, iterating over the table
            yields it as the only part.
        ev_option: sok.EmbeddingVariableOption.
        steps_to_live: DeepRec's older form of `GlobalStepEvict(steps_to_live)`; None or 0: none.

    Raises:
        ValueError: an argument is out of range or would be ignored, or a table of this name has
            other settings.
        TypeError: `ev_option` is not an EmbeddingVariableOption.
    """
    scope = v1.get_variable_scope()
    is_name, of = isinstance(name, str) and bool(name), f"table '{name}'"
    require(is_name, "name", "a string that is not empty", name)
    policies.check_option("ev_option", ev_option, EmbeddingVariableOption, of=of)
    global_variables = v1.GraphKeys.GLOBAL_VARIABLES
    holds_it = collections is None or global_variables in collections
    required = f"a list with '{global_variables}', whose initializer makes the table ready"
    require(holds_it, "collections", required, collections, of)
    refused = {
        "regularizer": regularizer or scope.regularizer,
        "constraint": constraint or scope.constraint,
        "custom_getter": custom_getter or scope.custom_getter,
        "init_data_source": init_data_source,
    }
    for argument, value in refused.items():
        require(value is None, argument, "None: hash tables do not support it", value, of)
    of_option = ev_option.init_option.initializer if ev_option and ev_option.init_option else None
    ev_option = policies.with_steps_to_live(ev_option, steps_to_live, of)
    full_name = f"{scope.name}/{name}" if scope.name else name
    ensure_initialized()
    initializers = (of_option, initializer, scope.initializer, "random_uniform")
    options = {
        "embedding_dim": embedding_dim,
        "name": full_name,
        "key_dtype": as_key_dtype(key_dtype, full_name).name,
        "dtype": check_row_dtype(value_dtype, f"table '{full_name}'", "value_dtype") or "float32",
        "initializer": next(choice for choice in initializers if choice is not None),
        "capacity": capacity,
        "trainable": trainable,
        "ev_option": ev_option,
    }
    with tf.init_scope():
        # Eager tables go with the communicator, when `sok.Init` replaces it.
        owner: Any = comm.current() if tf.executing_eagerly() else v1.get_default_graph()
        tables = owner._sok_tables = getattr(owner, "_sok_tables", {})
        table = tables.get(full_name)
        if table is None:
            if scope.reuse is True:
                rule, received = "exist", sorted(tables) or "no table"
                raise unmet(f"In a scope with reuse=True, table '{full_name}'", rule, received)
            table = tables[full_name] = EmbeddingVariable(**options)
            if not tf.executing_eagerly():  # some have it already
                held = {c: v1.get_collection(c) for c in collections or ()}
                missing = [c for c in held if all(v is not table for v in held[c])]
                owner.add_to_collections(missing, table)
        for argument, value in options.items():
            if _comparable(table.options[argument]) != _comparable(value):
                raise ValueError(
                    f"Table '{full_name}' exists with {argument}={table.options[argument]!r}. "
                    f"Received: {argument}={value!r}"
                )
        table.is_partitioned |= partitioner is not None
        return table


def _comparable(value):
    """Equal for equal settings; initializers, which compare by identity, by their config."""
    if isinstance(value, EmbeddingVariableOption):
        init = value.init_option or InitializerOption()
        init = dataclasses.replace(init, initializer=_comparable(init.initializer))
        return dataclasses.replace(value, init_option=init)
    if hasattr(value, "get_config") and not isinstance(value, type):
        return type(value), repr(sorted(value.get_config().items()))
    return value


class MultiHashVariable:
    """See `get_multihash_variable`; `tf.nn.embedding_lookup` takes it."""

    def __init__(self, name: str, variables: list, operation: str):
        # Two tf.Variables [rows, width]; the operation is "add", "mul" or "concat".
        self.name, self.variables, self.operation = name, variables, operation

    def lookup(self, ids: Any) -> tf.Tensor:
        """Rows of ids of any shape, in `[0, rows of the first table ** 2)`, with a last axis."""
        ids = tf.cast(tf.convert_to_tensor(ids), tf.int64)
        first, second = [int(variable.shape[0]) for variable in self.variables]
        problem = f"Ids must be in [0, {first * first}), the ids that table '{self.name}' can take"
        ids = checked(ids, tf.reduce_all((ids >= 0) & (ids < first * first)), problem)
        rows = [
            tf.nn.embedding_lookup(variable, part)
            for variable, part in zip(self.variables, (ids // first, ids % second), strict=True)
        ]
        if self.operation == "concat":
            return tf.concat(rows, -1)
        return rows[0] + rows[1] if self.operation == "add" else rows[0] * rows[1]


def get_multihash_variable(
    name: str,
    dims: Any,
    num_of_partitions: int = 2,
    complementary_strategy: str = "Q-R",
    operation: str = "add",
    dtype: Any = tf.float32,
    initializer: Any = None,
    regularizer: Any = None,
    trainable: bool | None = None,
    collections: Any = None,
    caching_device: Any = None,
    partitioner: Any = None,
    validate_shape: bool = True,
    use_resource: bool | None = None,
    custom_getter: Any = None,
    constraint: Any = None,
    synchronization: Any = tf.VariableSynchronization.AUTO,
    aggregation: Any = tf.VariableAggregation.NONE,
) -> MultiHashVariable:
    """Two tf.Variables, `name_0` and `name_1`, that together give the rows of `rows[0]**2` ids.

    The row of an id is made of row `id // dims[0][0]` of the first table and `id % dims[1][0]` of
    the second.

    Args:
        name: Name of the pair.
        dims: `[[rows, width], [rows, width]]`. The widths must be equal, except for "concat".
        num_of_partitions: Must be 2.
        complementary_strategy: Must be "Q-R", quotient and remainder.
        operation: "add", "mul" (also "mult") or "concat".
        partitioner: Ignored: the tables are small, and every rank holds all of them.

    The other arguments are those of `tf.compat.v1.get_variable`.
    """
    of, strategy = f"table '{name}'", complementary_strategy
    require(num_of_partitions == 2, "num_of_partitions", "2", num_of_partitions, of)
    require(strategy == "Q-R", "complementary_strategy", "'Q-R'", strategy, of)
    require(operation in OPERATIONS, "operation", f"one of {OPERATIONS}", operation, of)
    pairs = [list(pair) if isinstance(pair, (list, tuple)) else [] for pair in dims]
    numbers = [as_integer(number) or 0 for pair in pairs for number in pair]
    fits = [len(pair) for pair in pairs] == [2, 2] and min(numbers, default=0) >= 1
    require(fits, "dims", "two pairs [rows, width] of positive integers", dims, of)
    same = operation == "concat" or pairs[0][1] == pairs[1][1]
    require(same, "dims", f"of the same width if operation='{operation}'", dims, of)
    of_tables = (dtype, initializer, regularizer, trainable, collections, caching_device)
    # A partitioner is not passed on.
    rest = (None, validate_shape, use_resource, custom_getter, constraint, synchronization)
    variables = [
        v1.get_variable(f"{name}_{number}", shape, *of_tables, *rest, aggregation)
        for number, shape in enumerate(pairs)
    ]
    return MultiHashVariable(name, variables, "mul" if operation == "mult" else operation)


def _look_up(function, arguments):
    """Of a MultiHashVariable, which TensorFlow cannot convert."""
    table, norm = arguments.get("params"), arguments.get("max_norm")
    if not isinstance(table, MultiHashVariable):
        return None
    required = "None for a multihash variable, whose rows are made of two"
    require(norm is None, "max_norm", required, norm, f"table '{table.name}'")
    return table.lookup(arguments["ids"])


for _nn in (tf.nn, v1.nn):
    OnTypeError(_nn.embedding_lookup, _look_up)


def enable_distributed_strategy(strategy: str | None = "collective") -> None:
    """DeepRec's switch, which initializes the package; use it instead of `sok.Init`, or after it.

    If `sok.Init` has been called, nothing else is initialized. To choose a seed, call `sok.Init`.
    In a `tf.compat.v1` graph it takes effect at once; there is no op to run.

    Args:
        strategy: "collective": keys of every table are spread over all processes of the job, which
            may be only one. If Horovod is installed it is always initialized, because scripts then
            use `hvd.size()`. "localized" or None: this process is the whole job.

    Raises:
        ValueError: another strategy, such as DeepRec's "parameter_server".
        RuntimeError: "localized" in a job of several processes: each would train its own copy of
            the tables, and never see the others' gradients.
        ImportError: several processes, and neither MPI nor Horovod is installed.
    """
    strategies = ("collective", "localized", None)
    require(strategy in strategies, "strategy", f"one of {strategies}", strategy)
    if strategy != "collective":
        is_initialized = comm.is_initialized()
        world_size = comm.current().world_size if is_initialized else comm.launched_world_size()
        if world_size > 1:
            raise RuntimeError(
                "A localized strategy needs a job of one process: with more, each would train a "
                "private copy of every table. Use strategy='collective'. "
                f"Received: strategy={strategy!r} in a job of {world_size} processes"
            )
    by_program = horovod.import_if_installed() if strategy == "collective" else None
    ensure_initialized()
    if by_program is not None and not by_program.is_initialized():
        by_program.init()
