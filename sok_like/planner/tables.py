"""The data classes of a plan: a table, a shard of a table, and the plan that lists all shards.

    table [input_dim, output_dim]           columns
                                    0 . . . 3 . . . 6 . . 8
                                 0  +-------+-------+-----+
                            rows    | rank 0| rank 2| r 3 |   column-wise: contiguous columns,
                                    |       |       |     |   in the order of the ranks
                        input_dim   +-------+-------+-----+

Invariant: every rank holds all of a replicated table; the shards of any other table cover each
element exactly once. A hash table has no rows yet: each rank's shard is for the keys with
`key % world_size == rank`.

Along which axes a table may be cut depends on what its regularizer and its constraint read together
(only Keras' own classes are known: a subclass may read more):

    L1, L2, L1L2; NonNeg             one element                rows and columns
    MaxNorm, MinMaxNorm, UnitNorm    a line along their `axis`  the other axis
    all others, also functions       everything                 neither
"""

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from sok_like.runtime.checks import as_integer, unmet, wrong_argument

# How a table may be sharded, in the order of the groups.
DATA_PARALLEL, COLUMN_WISE, ROW_WISE, HASHED = range(4)
KINDS = ("data-parallel", "column-wise", "row-wise", "hash table")
ADDITIVE = ("L1", "L2", "L1L2")  # regularizers that are sums over elements
READERS = ("embeddings_regularizer", "embeddings_constraint")
ROWS, COLUMNS = 0, 1  # axes


def stock_name(reader: Any) -> str | None:
    """The class of a regularizer or constraint (object, name or configuration), if Keras has it."""
    if isinstance(reader, str):
        return reader.title().replace("_", "")
    if isinstance(reader, Mapping):
        module, name = reader.get("module", "keras"), reader.get("class_name")
    else:
        module, name = type(reader).__module__, type(reader).__name__
    return name if str(module).partition(".")[0] in ("keras", "tf_keras") else None


def whole_axes(reader: Any) -> set[int]:
    """The axes along which a regularizer or constraint needs a whole table; none for None."""
    name = stock_name(reader)
    if reader is None or name in (*ADDITIVE, "NonNeg"):
        return set()
    config = reader.get("config", {}) if isinstance(reader, Mapping) else {}
    axis = config.get("axis", getattr(reader, "axis", 0))
    if axis is None or name not in ("MaxNorm", "MinMaxNorm", "UnitNorm"):
        return {ROWS, COLUMNS}
    return {each % 2 for each in (axis if isinstance(axis, (list, tuple)) else [axis])}


def check_cut(readers: Mapping[str, Any], axis: int, table_name: str, instead: str) -> None:
    """ValueError if `readers` need a table whole along `axis`; `instead` leaves it whole."""
    for argument, reader in readers.items():
        if axis in whole_axes(reader):
            raise ValueError(
                f"`{argument}` of a table whose {('rows', 'columns')[axis]} are on several ranks "
                f"must not need all of them. To leave the table whole, give {instead}. Received: "
                f"{argument}={stock_name(reader) or reader!r} (table '{table_name}')"
            )


@dataclasses.dataclass(frozen=True)
class TableConfig:
    table_id: int  # its position in the user's list
    input_dim: int  # number of rows; 0 for a hash table, whose rows are created with its keys
    output_dim: int
    # The embedding's own configuration, with its class under `"layer_type"` (None if the user gave
    # a plain dictionary without it).
    config: Mapping[str, Any]

    @property
    def size(self) -> int:
        """Number of elements."""
        return self.input_dim * self.output_dim

    @property
    def hashed(self) -> bool:
        return is_hashed(self.config)

    @property
    def name(self) -> str:
        """Its name in errors."""
        return str(self.config.get("name") or f"table_{self.table_id}")

    def _readers(self) -> dict[str, Any]:
        return {argument: self.config.get(argument) for argument in READERS}

    def most_slices(self, world_size: int) -> int:
        """The largest number of slices of columns that it can have."""
        axes = set().union(*map(whole_axes, self._readers().values()))
        return 1 if COLUMNS in axes else min(world_size, self.output_dim)

    def check_cut(self, axis: int, instead: str) -> None:
        """See the function `check_cut`; `instead` has a place for the number of elements."""
        check_cut(self._readers(), axis, self.name, instead.format(self.size))


@dataclasses.dataclass(frozen=True)
class Shard:
    """A rectangle `[start, stop)` of a table, held by a rank; a hash table has no rows."""

    table_id: int
    rank: int
    kind: int
    row_start: int
    row_stop: int
    column_start: int
    column_stop: int
    layer: int  # which of the rank's layers of this kind holds it
    first_row: int  # its first row in that layer's variable

    @property
    def num_rows(self) -> int:
        return self.row_stop - self.row_start

    @property
    def num_columns(self) -> int:
        return self.column_stop - self.column_start

    @property
    def size(self) -> int:
        """Number of elements."""
        return self.num_rows * self.num_columns


@dataclasses.dataclass(frozen=True)
class Plan:
    """Every shard of every table, on every rank."""

    world_size: int
    tables: tuple[TableConfig, ...]  # by id
    # Each table's kind (`DATA_PARALLEL`, `COLUMN_WISE`, `ROW_WISE` or `HASHED`), by id.
    kinds: tuple[int, ...]
    # Ordered by table, then rank. A row-wise table with fewer rows than ranks has empty shards; a
    # column-wise table has no shard on a rank that holds none of its columns.
    shards: tuple[Shard, ...]
    input_table_map: tuple[int, ...]  # the table of each input

    def shards_of(self, table_id: int) -> list[Shard]:
        """The shards of a table, in rank order."""
        return [shard for shard in self.shards if shard.table_id == table_id]

    def shards_on(self, rank: int) -> list[Shard]:
        """The shards a rank holds, in table order."""
        return [shard for shard in self.shards if shard.rank == rank]

    def shard(self, table_id: int, rank: int) -> Shard | None:
        """A rank's shard of a table; None if it has none."""
        found = (s for s in self.shards if s.table_id == table_id and s.rank == rank)
        return next(found, None)


def read_tables(embeddings: Sequence[Any]) -> list[TableConfig]:
    """The tables of embeddings: objects with `get_config()`, or dictionaries."""
    embeddings = list_embeddings(embeddings)
    if not embeddings:
        raise ValueError("`embeddings` must hold at least one embedding. Received: an empty list")
    tables = []
    for table_id, embedding in enumerate(embeddings):
        # A copy: a Keras layer may return the dictionary that it keeps.
        if isinstance(embedding, Mapping):
            config = {"layer_type": None, **embedding}
        elif callable(getattr(embedding, "get_config", None)):
            config = {**embedding.get_config(), "layer_type": type(embedding)}
            for argument in {*READERS} & {*config}:
                reader = getattr(embedding, argument, None)
                # Keras makes no object again of a function, or of a class that it does not know.
                if reader is not None and stock_name(reader) is None:
                    config[argument] = reader
        else:
            required = "hold layers with get_config(), or dictionaries"
            received = f"embeddings[{table_id}]={embedding!r}"
            raise unmet("`embeddings`", required, received, error=TypeError)
        for argument in ("output_dim",) if is_hashed(config) else ("input_dim", "output_dim"):
            value = as_integer(config.get(argument))
            if value is None or value < 1:
                required, received = "be a positive integer", f"{argument}={config.get(argument)!r}"
                raise unmet(f"`{argument}` of embeddings[{table_id}]", required, received)
            config[argument] = value
        num_rows = 0 if is_hashed(config) else config["input_dim"]
        tables.append(TableConfig(table_id, num_rows, config["output_dim"], config))
    return tables


def list_embeddings(embeddings: Any) -> list[Any]:
    """The embeddings of any iterable as a list; TypeError for a single embedding."""
    if isinstance(embeddings, Mapping) or not isinstance(embeddings, Iterable):
        raise wrong_argument("embeddings", "a list of embeddings", embeddings, error=TypeError)
    return list(embeddings)


def is_hashed(config: Mapping[str, Any]) -> bool:
    return bool(config.get("hash_table", False))
