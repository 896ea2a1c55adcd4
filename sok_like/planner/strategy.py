"""`DistEmbeddingStrategy` gives every row and column of a list of embeddings to a rank.

    tables --thresholds--> data-parallel | column-wise | row-wise | hash table
    column-wise: slice -> place on ranks -> merge slices of a table on one rank -> join tables

The result is the same on every rank: one object holds the plan of all ranks.

Its attributes have the names that DMP's users know. Lists over column-wise or row-wise tables or
inputs hold positions within that group: `table_groups[1][k]` is the id of the k-th column-wise
table, `input_groups[1][k]` the k-th input of such a table. Some of these lists only programs of
DMP's users read, as they follow from the others; this package reads `Plan` instead.
"""

import collections
import itertools
from collections.abc import Mapping, Sequence
from typing import Any

from sok_like.planner import placement
from sok_like.planner.tables import (
    COLUMN_WISE,
    COLUMNS,
    DATA_PARALLEL,
    HASHED,
    ROW_WISE,
    ROWS,
    Plan,
    Shard,
    Step,
    format_report,
    read_tables,
)
from sok_like.runtime.checks import check_integer, unmet

Config = dict[str, Any]


class DistEmbeddingStrategy:
    """Places embedding tables on ranks.

    Args:
        embeddings: Objects with `get_config()`, or plain dictionaries, with `input_dim` and
            `output_dim`; for a hash table, `hash_table=True` and `output_dim`. They and their
            configurations stay unchanged.
        world_size: Number of ranks.
        strategy: "basic", "memory_balanced" or "memory_optimized"; see `placement`.
        input_table_map: The table of each input; None: input i belongs to table i. A table may
            have several inputs, or none.
        column_slice_threshold: Column-wise tables with more elements are sliced by columns. None
            slices only if there are fewer column-wise tables than ranks, and only as needed.
        row_slice_threshold: Tables with at least as many elements are row-wise over all ranks.
        data_parallel_threshold: Tables with at most as many elements are replicated, even those
            large enough for `row_slice_threshold`; 0 replicates no table.

    Ranks without a shard are legal if the tables cannot be sliced further.

    Attributes:
        plan: All shards, as a `Plan`.
        strategy: The strategy used; "basic" on one rank.
        global_configs: Each table's configuration, with its class under `"layer_type"`.
        table_groups: Ids of the data-parallel, column-wise and row-wise tables; if there are hash
            tables, a fourth list has theirs.
        input_groups: Inputs of each group.
        map_groups: For each of these inputs, its table's position in the group.
        rev_group_ids: Position of input i in the concatenated `input_groups`.
        dp_configs: Configurations of the replicated tables.
        hash_configs: Configurations of the hash tables. Each rank holds their keys with
            `key % world_size == rank`.
        table_ids: Per rank, the column-wise tables it holds, in its own order.
        input_ids_list: Per rank, the inputs of those tables, table after table.
        local_configs: Per rank, configurations of its layers: merged, joined, named.
        local_group_list: Per rank and layer, positions in `table_ids[rank]` of the joined tables.
        local_weight_offsets: Per rank and layer, the first row of each joined table, then the
            number of rows.
        row_sliced_configs: Per rank, configurations of the row-wise shards; `input_dim` is 0 for
            an empty shard of a table with fewer rows than ranks.
        local_maps: Per rank, the layer of each of its inputs.
        local_input_offsets: Per rank, what to add to the keys of each of its inputs.
        widths_list_flat: Columns of the output of each input of each rank, in rank order: the
            widths of what an exchange receives.
        rev_tp_ids: Positions that bring those outputs into input order, slices in column order.
        sliced_out_ranges: In that order, `[i, i + n]` if input i has n slices and all inputs before
            it are already concatenated.
        row_inputs_offsets: Per rank, first row of the shard that each row-wise input looks up.

    Raises:
        ValueError: an argument is out of range, `column_slice_threshold` leaves a rank without a
            table although a smaller one would not, or a threshold cuts a table whose regularizer or
            constraint needs all of it (see `tables`).
    """

    def __init__(
        self,
        embeddings: Sequence[Any],
        world_size: int,
        strategy: str = "basic",
        input_table_map: Sequence[int] | None = None,
        column_slice_threshold: int | None = None,
        row_slice_threshold: int | None = None,
        data_parallel_threshold: int | None = None,
    ):
        placement.check_strategy(strategy)
        ranks = check_integer("world_size", world_size)
        check = placement.check_threshold
        self.world_size = ranks
        self.strategy = "basic" if ranks == 1 else strategy
        self.column_slice_threshold = check("column_slice_threshold", column_slice_threshold, 1)
        self.row_slice_threshold = check("row_slice_threshold", row_slice_threshold, 0)
        self.data_parallel_threshold = check("data_parallel_threshold", data_parallel_threshold, 0)
        self._tables = read_tables(embeddings)
        self.global_configs = [dict(table.config) for table in self._tables]
        self.input_table_map = placement.check_input_table_map(input_table_map, len(self._tables))
        self.table_groups = self.init_table_groups(
            self.global_configs, self.row_slice_threshold, self.data_parallel_threshold
        )
        self._check_cuts()
        self.input_groups, self.map_groups, self.rev_group_ids = self.init_input_and_map_groups(
            self.table_groups, self.input_table_map
        )
        self.dp_configs = [dict(self.global_configs[i]) for i in self.table_groups[DATA_PARALLEL]]
        self.hash_configs = [dict(table.config) for table in self._tables if table.hashed]
        self._place_columns()
        self._list_exchanged()
        self.row_sliced_configs, self.row_inputs_offsets = self.create_row_sliced_configs(
            [self.global_configs[i] for i in self.table_groups[ROW_WISE]], ranks
        )
        self.plan = self._make_plan()

    def init_table_groups(
        self,
        table_configs: Sequence[Mapping[str, Any]],
        row_slice_threshold: int | None,
        data_parallel_threshold: int | None,
    ) -> list[list[int]]:
        """Ids of the data-parallel, column-wise, row-wise and, if there are any, hash tables."""
        groups: list[list[int]] = [[], [], []]
        if any(config.get("hash_table") for config in table_configs):
            groups.append([])
        for table_id, config in enumerate(table_configs):
            kind = COLUMN_WISE
            if config.get("hash_table"):
                kind = HASHED
            elif self.world_size > 1:
                size = config["input_dim"] * config["output_dim"]
                if data_parallel_threshold is not None and size <= data_parallel_threshold:
                    kind = DATA_PARALLEL
                elif row_slice_threshold is not None and size >= row_slice_threshold:
                    kind = ROW_WISE
            groups[kind].append(table_id)
        return groups

    def init_input_and_map_groups(
        self, table_groups: Sequence[Sequence[int]], input_table_map: Sequence[int]
    ) -> tuple[list[list[int]], list[list[int]], list[int]]:
        """Groups inputs by kind of table: the inputs, their tables' positions, the order back."""
        place = {
            table: (group, i)
            for group, tables in enumerate(table_groups)
            for i, table in enumerate(tables)
        }
        input_groups: list[list[int]] = [[] for _ in table_groups]
        map_groups: list[list[int]] = [[] for _ in table_groups]
        for i, table in enumerate(input_table_map):
            if table not in place:
                subject = "Wrong input initializing input/map groups: `input_table_map`"
                received = f"input_table_map[{i}]={table!r}"
                raise unmet(subject, "hold tables of `table_groups`", received)
            group, position = place[table]
            input_groups[group].append(i)
            map_groups[group].append(position)
        order = [i for group in input_groups for i in group]
        return input_groups, map_groups, _inverse(order)

    def _check_cuts(self) -> None:
        """Refuses thresholds that cut what must be whole; without one, it is not cut."""
        for table_id in self.table_groups[ROW_WISE]:
            instead = "`row_slice_threshold` above its {} elements, or `data_parallel_threshold`"
            self._tables[table_id].check_cut(ROWS, instead + " not below")
        threshold = self.column_slice_threshold
        for table in (self._tables[i] for i in self.table_groups[COLUMN_WISE]):
            is_larger = threshold is not None and table.size > threshold
            if is_larger and min(self.world_size, table.output_dim) > 1:
                table.check_cut(COLUMNS, "`column_slice_threshold` not below its {}")

    def maybe_slice_table_column(
        self, orig_config: Mapping[str, Any], column_slice_threshold: int | None, world_size: int
    ) -> list[Config]:
        """Configurations of a table's slices, in column order; one if it is not sliced."""
        (table,) = read_tables([orig_config])
        slices = placement.num_slices(table, column_slice_threshold, world_size)
        parts = (placement.even_part(table.output_dim, i, slices) for i in range(slices))
        return [{**orig_config, "output_dim": stop - start} for start, stop in parts]

    def create_col_sliced_configs(
        self,
        global_col_configs: Sequence[Mapping[str, Any]],
        world_size: int,
        column_slice_threshold: int | None,
        input_table_map: Sequence[int],
    ) -> tuple[list[list[Config]], list[list[int]]]:
        """Slices of each column-wise table, and the `sliced_out_ranges` if none were merged."""
        if column_slice_threshold is None and global_col_configs:
            column_slice_threshold = placement.automatic_threshold(
                read_tables(global_col_configs), world_size
            )
        sliced = [
            self.maybe_slice_table_column(config, column_slice_threshold, world_size)
            for config in global_col_configs
        ]
        num_slices = ((i, len(sliced[table])) for i, table in enumerate(input_table_map))
        return sliced, [[i, i + number] for i, number in num_slices if number > 1]

    def apply_strategy(
        self, strategy: str, world_size: int, sliced_configs: Sequence[Sequence[Config]]
    ) -> list[list[tuple[int, int]]]:
        """The slices of each rank, as `(table, slice)`, before those of one table are merged."""
        slices = [(t, s) for t, configs in enumerate(sliced_configs) for s in range(len(configs))]
        of_slices = (sliced_configs[t][s] for t, s in slices)
        sizes = [config["input_dim"] * config["output_dim"] for config in of_slices]
        ranks = placement.place(strategy, world_size, [t for t, _ in slices], sizes)
        return [[slices[i] for i in rank] for rank in ranks]

    apply_stragety = apply_strategy  # DMP's own spelling, used by its users' programs

    def _place_columns(self) -> None:
        configs = [self.global_configs[i] for i in self.table_groups[COLUMN_WISE]]
        input_map = self.map_groups[COLUMN_WISE]
        sliced, _ = self.create_col_sliced_configs(
            configs, self.world_size, self.column_slice_threshold, input_map
        )
        ranks = self.apply_strategy(self.strategy, self.world_size, sliced)
        self._check_no_rank_is_idle(ranks, sliced, configs)

        # By rank and table: the start and stop of its columns, its layer, and its first row there.
        self._placed: list[dict[int, tuple[int, int, int, int]]] = []
        self.table_ids: list[list[int]] = []
        joined = []
        # Columns are numbered in rank order, so a rank's columns of a table are contiguous even if
        # its slices were not neighbours. Slices have no content yet, so any numbering is valid.
        assigned = [0] * len(configs)
        for slices in ranks:
            columns: dict[int, tuple[int, int]] = {}  # of the rank's tables, with all their slices
            for table, position in slices:
                start, _ = columns.get(table, (assigned[table], 0))
                assigned[table] += sliced[table][position]["output_dim"]
                columns[table] = start, assigned[table]
            merged = []
            for table, (start, stop) in columns.items():
                merged.append({**configs[table], "output_dim": stop - start})
                if stop - start < configs[table]["output_dim"] and "name" in configs[table]:
                    merged[-1]["name"] = f"{configs[table]['name']}_columns_{start}_{stop}"
            tables = list(columns)
            of_rank = placement.join_tables(merged)
            _, groups, offsets = of_rank
            placed = {
                tables[i]: (*columns[tables[i]], layer, first_row)
                for layer, (group, rows) in enumerate(zip(groups, offsets, strict=True))
                for i, first_row in zip(group, rows, strict=False)
            }
            self._placed.append(placed)
            self.table_ids.append(tables)
            joined.append(of_rank)
        lists = map(list, zip(*joined, strict=True))
        self.local_configs, self.local_group_list, self.local_weight_offsets = lists

    def _list_exchanged(self) -> None:
        """Lists of what ranks look up and receive."""
        input_map = self.map_groups[COLUMN_WISE]
        inputs_of: dict[int, list[int]] = collections.defaultdict(list)
        for i, table in enumerate(input_map):
            inputs_of[table].append(i)
        self.input_ids_list = [[i for t in ids for i in inputs_of[t]] for ids in self.table_ids]
        pairs = zip(self._placed, self.input_ids_list, strict=True)
        of_ranks = [[placed[input_map[i]] for i in inputs] for placed, inputs in pairs]
        self.local_maps = [[layer for *_, layer, _ in of_rank] for of_rank in of_ranks]
        self.local_input_offsets = [
            [first_row for *_, first_row in of_rank] for of_rank in of_ranks
        ]
        self.widths_list_flat = [stop - start for start, stop, *_ in itertools.chain(*of_ranks)]
        order = [*itertools.chain(*self.input_ids_list)]
        self.rev_tp_ids = _inverse(order)
        num_slices = collections.Counter(order)  # of each input
        self.sliced_out_ranges = [[i, i + n] for i, n in sorted(num_slices.items()) if n > 1]

    def _check_no_rank_is_idle(self, ranks, sliced, configs) -> None:
        # Replicated and row-wise tables give every rank work. Without a threshold of the user,
        # tables were already sliced as far as it helps.
        if self.column_slice_threshold is None or all(ranks) or len(configs) < len(self._tables):
            return
        most = [table.most_slices(self.world_size) for table in read_tables(configs)]
        if any(len(slices) < limit for slices, limit in zip(sliced, most, strict=True)):
            idle = [rank for rank, slices in enumerate(ranks) if not slices]
            raise ValueError(
                "Not enough table after slicing to run on all worker. Try decrease "
                "column_slice_threshold or decrease worker count. Received: "
                f"column_slice_threshold={self.column_slice_threshold}, "
                f"world_size={self.world_size}, which leaves ranks {idle} without a table"
            )

    def deal_hash_inputs(self) -> None:
        """Gives each input of a hash table to one rank, for model-parallel inputs."""
        # That is the one with the fewest inputs. `input_ids_list` then has numbers of inputs, those
        # of hash tables last; the parallel lists (`local_maps`, ...) have the others only.
        if not self.hash_configs:
            return
        numbers = self.input_groups[COLUMN_WISE]
        self.input_ids_list = [[numbers[i] for i in ids] for ids in self.input_ids_list]
        for i in self.input_groups[HASHED]:
            min(self.input_ids_list, key=len).append(i)

    def create_row_sliced_configs(
        self, global_row_configs: Sequence[Mapping[str, Any]], world_size: int
    ) -> tuple[list[list[Config]], list[list[int]]]:
        """Per rank: configurations of the row-wise shards, and first rows, one per row input."""
        configs, offsets = [], []
        for rank in range(world_size):
            sizes = [config["input_dim"] for config in global_row_configs]
            ranges = [placement.even_part(size, rank, world_size) for size in sizes]
            shards = []
            for config, (start, stop) in zip(global_row_configs, ranges, strict=True):
                shards.append({**config, "input_dim": stop - start})
                if "name" in config:
                    shards[-1]["name"] = f"{config['name']}_rows_{start}_{stop}"
            configs.append(shards)
            offsets.append([ranges[table][0] for table in self.map_groups[ROW_WISE]])
        return configs, offsets

    def _make_plan(self) -> Plan:
        kinds = {i: kind for kind, group in enumerate(self.table_groups) for i in group}
        positions = {table_id: i for group in self.table_groups for i, table_id in enumerate(group)}
        shards, num_row_layers = [], [0] * self.world_size
        for table_id, table in enumerate(self._tables):
            for rank in range(self.world_size):
                kind, position, rows = kinds[table_id], positions[table_id], (0, table.input_dim)
                if kind == ROW_WISE:
                    rows = placement.even_part(table.input_dim, rank, self.world_size)
                    position = num_row_layers[rank]
                    num_row_layers[rank] += rows[0] < rows[1]  # an empty shard has none
                whole = (0, table.output_dim, position, 0)
                placed = self._placed[rank].get(position) if kind == COLUMN_WISE else whole
                if placed is not None:
                    shards.append(Shard(table_id, rank, kind, *rows, *placed))
        of_tables = tuple(kinds[table_id] for table_id in range(len(self._tables)))
        listed = tuple(self._tables), of_tables, tuple(shards), tuple(self.input_table_map)
        return Plan(self.world_size, *listed)

    def report(
        self,
        local_batch: int = 1024,
        hotness: int | Sequence[int] = 1,
        slots_per_row: int = 0,
        element_bytes: int = 4,
        key_bytes: int = 8,
    ) -> str:
        """What each rank holds and what a training step sends.

        Args:
            local_batch: Samples per rank and step.
            hotness: Keys per sample: one number for all inputs, or one per input.
            slots_per_row: Number of slot variables of the size of the row: 0 for SGD, 1 for
                Adagrad, 2 for Adam.
            element_bytes: Bytes per element of a row.
            key_bytes: Bytes per key.

        Returns:
            One line per shard and one per rank, numbers right-aligned; then the bytes of the
            largest rank, and their ratio to the mean.
        """
        step = Step(local_batch, hotness, slots_per_row, element_bytes, key_bytes)  # type: ignore[arg-type]
        return format_report(self.plan, step)


def _inverse(order):
    """Positions that put `order` in ascending order; equal entries keep their order."""
    return sorted(range(len(order)), key=order.__getitem__)
