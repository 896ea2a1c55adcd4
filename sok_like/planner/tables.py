"""A plan: tables, their shards, and a report of what ranks hold and what a step sends.

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

The report counts per rank and step (`B` samples per rank, hotness `h`, `N` ranks), as upper bounds:

    column-wise    a rank receives the keys of all other ranks, (N - 1) * B * h per input, and
                   sends back their rows: one per sample with a combiner, otherwise one per key
    row-wise       keys are assumed to be uniform over rows: the rank receives the shard's share of
                   all keys of other ranks and sends one row for each, fewer if keys repeat
    hash table     as row-wise; the shard's share of all keys is 1 / N
    data-parallel  no keys; the gradients of the rank's B * h rows, with their keys, to N - 1 ranks

Gradients travel back like the rows. For a hash table the report shows its keys in place of its
rows, and the bytes of a full table; without a capacity it shows "grows" and counts no bytes.
"""

import dataclasses
from collections.abc import Container, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from sok_like.runtime.checks import as_integer, check_integer, require, unmet, wrong_argument

# How a table may be sharded, in the order of the groups.
DATA_PARALLEL, COLUMN_WISE, ROW_WISE, HASHED = range(4)
KINDS = ("data-parallel", "column-wise", "row-wise", "hash table")
ADDITIVE = ("L1", "L2", "L1L2")  # regularizers that are sums over elements
READERS = ("embeddings_regularizer", "embeddings_constraint")
ROWS, COLUMNS = 0, 1  # axes
_HEADINGS = ("rank", "table", "kind", "rows", "columns", "bytes", "keys/step", "bytes/step")


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
        return bool(self.config.get("hash_table", False))

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
    layer: int  # which of the rank's layers of this kind holds it; an empty shard is in none
    first_row: int  # its first row in that layer's variable

    @property
    def num_rows(self) -> int:
        return self.row_stop - self.row_start

    @property
    def num_columns(self) -> int:
        return self.column_stop - self.column_start


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
        hashed = config.get("hash_table")
        for argument in ("output_dim",) if hashed else ("input_dim", "output_dim"):
            value = as_integer(config.get(argument))
            if value is None or value < 1:
                required, received = "be a positive integer", f"{argument}={config.get(argument)!r}"
                raise unmet(f"`{argument}` of embeddings[{table_id}]", required, received)
            config[argument] = value
        num_rows = 0 if hashed else config["input_dim"]
        tables.append(TableConfig(table_id, num_rows, config["output_dim"], config))
    return tables


def list_embeddings(embeddings: Any) -> list[Any]:
    """The embeddings of any iterable as a list; TypeError for a single embedding."""
    if isinstance(embeddings, Mapping) or not isinstance(embeddings, Iterable):
        raise wrong_argument("embeddings", "a list of embeddings", embeddings, error=TypeError)
    return list(embeddings)


class Step(NamedTuple):
    """A training step, as `DistEmbeddingStrategy.report` describes it."""

    local_batch: int
    hotness: Sequence[int]
    slots_per_row: int
    element_bytes: int
    key_bytes: int


def shard_traffic(plan: Plan, shard: Shard, step: Step) -> tuple[int, int]:
    """Keys and bytes that a step sends for one shard."""
    others = plan.world_size - 1
    table = plan.tables[shard.table_id]
    row_bytes = shard.num_columns * step.element_bytes
    combined = table.config.get("combiner") is not None
    num_keys = num_bytes = 0
    for table_id, keys_per_sample in zip(plan.input_table_map, step.hotness, strict=True):
        if table_id != shard.table_id:
            continue
        keys = others * step.local_batch * keys_per_sample
        if shard.kind == DATA_PARALLEL:
            num_bytes += keys * (row_bytes + step.key_bytes)
            continue
        if shard.kind == COLUMN_WISE:
            rows = others * step.local_batch if combined else keys
        elif shard.kind == HASHED:
            keys = rows = -(-keys // plan.world_size)
        else:
            keys = rows = -(-keys * shard.num_rows // table.input_dim)
        # Rows forward, their gradients back.
        num_bytes += keys * step.key_bytes + 2 * rows * row_bytes
        num_keys += keys
    return num_keys, num_bytes


def format_report(plan: Plan, step: Step) -> str:
    """See `DistEmbeddingStrategy.report`; `step.hotness` may be one number for all inputs."""
    num_inputs, hotness = len(plan.input_table_map), step.hotness
    by_input = list(hotness) if isinstance(hotness, Sequence) else [hotness] * num_inputs
    required = f"one integer or one per input ({num_inputs} of them)"
    require(len(by_input) == num_inputs, "hotness", required, hotness)
    step = step._replace(hotness=by_input)
    numbers = {**step._asdict(), **{f"hotness[{i}]": value for i, value in enumerate(by_input)}}
    del numbers["hotness"]
    for argument, value in numbers.items():
        check_integer(argument, value, 0)
    lines: list[tuple] = []
    totals = []
    for rank in range(plan.world_size):
        sums = [0, 0, 0]
        shards = plan.shards_on(rank)
        for shard in shards:
            table = plan.tables[shard.table_id]
            name = table.config.get("name") or f"table {table.table_id}"
            num_rows, rows = shard.num_rows, f"{shard.row_start}:{shard.row_stop}"
            if shard.kind == HASHED:
                num_rows = table.config.get("capacity") or 0
                rows = f"{rank} mod {plan.world_size}"
            columns = f"{shard.column_start}:{shard.column_stop}"
            num_bytes = num_rows * shard.num_columns * (1 + step.slots_per_row) * step.element_bytes
            size = "grows" if shard.kind == HASHED and not num_rows else num_bytes
            of_step = shard_traffic(plan, shard, step)
            lines.append((rank, name, KINDS[shard.kind], rows, columns, size, *of_step))
            sums = [total + n for total, n in zip(sums, (num_bytes, *of_step), strict=True)]
        lines.append((rank, "all" if shards else "idle", "", "", "", *sums))
        totals.append(sums[0])
    mean = sum(totals) / plan.world_size
    largest = max(totals) / mean if mean else 1.0
    cells = [[f"{c:,}" if isinstance(c, int) else c for c in line] for line in lines]
    text = aligned([_HEADINGS, *cells], left={1, 2})  # names; the rest are numbers
    return "\n".join([*text, f"largest rank {max(totals):,} bytes, {largest:.2f} of the mean"])


def aligned(rows: Sequence[Sequence[str]], left: Container[int]) -> list[str]:
    """One line per row; cells are aligned to the right, those of the columns `left` to the left."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(
            cell.ljust(width) if i in left else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        for row in rows
    ]
