"""`DistEmbeddingStrategy`: from a list of embeddings to the place of every row and column.

    tables --thresholds--> data-parallel | column-wise | row-wise | hash table
    column-wise: cut into slices -> placed on ranks -> slices that meet are merged -> tables joined

The result does not depend on the rank that asks: one object holds the plan of all ranks.

Its attributes carry the names by which DMP's users know them. Lists that run over column-wise or
row-wise tables or inputs hold positions within that group: `table_groups[1][k]` is the id of the
k-th column-wise table, `input_groups[1][k]` the k-th input that goes to one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from sok_like.planner import column_slicing, concat, placement, thresholds
from sok_like.planner.report import format_report
from sok_like.planner.tables import (
    COLUMN_WISE,
    DATA_PARALLEL,
    HASHED,
    ROW_WISE,
    Plan,
    Shard,
    TableConfig,
    is_hashed,
    read_tables,
)
from sok_like.runtime.checks import as_integer

Config = dict[str, Any]


class DistEmbeddingStrategy:
    """Places embedding tables on ranks.

    Args:
        embeddings: Objects with `get_config()`, or plain dictionaries, holding `input_dim` and
            `output_dim`; of a hash table, `hash_table=True` and `output_dim`. Neither they nor
            their configurations are changed.
        world_size: Number of ranks.
        strategy: "basic", "memory_balanced" or "memory_optimized"; see `placement`.
        input_table_map: The table of each input; None: input i belongs to table i. A table may
            have several inputs, or none.
        column_slice_threshold: Column-wise tables of more elements are cut along their width; see
            `column_slicing`. None cuts only where there are fewer column-wise tables than ranks,
            and no more than needed.
        row_slice_threshold: Tables of at least as many elements are laid row-wise over all ranks.
        data_parallel_threshold: Tables of at most as many elements are replicated, even those that
            are large enough for `row_slice_threshold`; 0 replicates none.

    Ranks without a shard are legal where the tables cannot be cut further.

    Attributes:
        plan: All shards, as a `Plan`.
        strategy: The strategy used; "basic" on one rank.
        global_configs: Each table's configuration, with its class under `"layer_type"`.
        table_groups: Ids of the data-parallel, column-wise and row-wise tables; where there are
            hash tables, a fourth list holds theirs.
        input_groups: Inputs of each group.
        map_groups: For each of them, its table's position in the group.
        rev_group_ids: Where input i is in `input_groups` laid end to end.
        dp_configs: Configurations of the replicated tables.
        hash_configs: Configurations of the hash tables, of which each rank holds the keys with
            `key % world_size == rank`.
        table_ids: Per rank, the column-wise tables it holds, in its own order.
        input_ids_list: Per rank, the inputs of those tables, table after table.
        local_configs: Per rank, configurations of its layers: merged, joined, named.
        local_group_list: Per rank and layer, the positions in `table_ids[rank]` joined in it.
        local_weight_offsets: Per rank and layer, first row of each of them, and the row count.
        local_maps: Per rank, the layer of each of its inputs.
        local_input_offsets: Per rank, what to add to the keys of each of its inputs.
        widths_list_flat: Row widths of the ranks' inputs, all ranks end to end: what arrives.
        rev_tp_ids: Positions that bring those into input order, slices in column order.
        sliced_out_ranges: In that order, `[i, i + n]` where the n slices of input i stand once all
            inputs before it are whole.
        row_sliced_configs: Per rank, configurations of the row-wise shards; `input_dim` is 0 where
            a table has fewer rows than ranks.
        row_inputs_offsets: Per rank, first row of the shard that each row-wise input looks up.

    Raises:
        ValueError: an argument out of range, or a `column_slice_threshold` that leaves a rank with
            nothing though a smaller one would not.
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
        ranks = as_integer(world_size)
        if ranks is None or ranks < 1:
            raise ValueError(
                f"`world_size` must be a positive integer. Received: world_size={world_size!r}"
            )
        check = thresholds.check_threshold
        self.world_size = ranks
        self.strategy = "basic" if ranks == 1 else strategy
        self.column_slice_threshold = check("column_slice_threshold", column_slice_threshold, 1)
        self.row_slice_threshold = check("row_slice_threshold", row_slice_threshold, 0)
        self.data_parallel_threshold = check("data_parallel_threshold", data_parallel_threshold, 0)
        self._tables = read_tables(embeddings)
        self.global_configs = [dict(table.config) for table in self._tables]
        self.input_table_map = thresholds.check_input_table_map(input_table_map, len(self._tables))
        self.table_groups = self.init_table_groups(
            self.global_configs, self.row_slice_threshold, self.data_parallel_threshold
        )
        self.input_groups, self.map_groups, self.rev_group_ids = self.init_input_and_map_groups(
            self.table_groups, self.input_table_map
        )
        self.dp_configs = [dict(self.global_configs[i]) for i in self.table_groups[DATA_PARALLEL]]
        self.hash_configs = [dict(table.config) for table in self._tables if table.hashed]
        self._place_columns()
        self.row_sliced_configs, self.row_inputs_offsets = self.create_row_sliced_configs(
            [self.global_configs[i] for i in self.table_groups[ROW_WISE]], ranks
        )
        self.plan = self._make_plan()

    # Which group a table and an input belong to.

    def init_table_groups(
        self,
        table_configs: Sequence[Mapping[str, Any]],
        row_slice_threshold: int | None,
        data_parallel_threshold: int | None,
    ) -> list[list[int]]:
        """Ids of the data-parallel, column-wise and row-wise tables, and of hash tables if any."""
        groups: list[list[int]] = [[], [], []]
        if any(is_hashed(config) for config in table_configs):
            groups.append([])
        for table_id, config in enumerate(table_configs):
            kind = COLUMN_WISE
            if is_hashed(config):
                kind = HASHED
            elif self.world_size > 1:
                size = config["input_dim"] * config["output_dim"]
                kind = thresholds.kind_of(size, row_slice_threshold, data_parallel_threshold)
            groups[kind].append(table_id)
        return groups

    def init_input_and_map_groups(
        self, table_groups: Sequence[Sequence[int]], input_table_map: Sequence[int]
    ) -> tuple[list[list[int]], list[list[int]], list[int]]:
        """See `thresholds.group_inputs`."""
        return thresholds.group_inputs(table_groups, input_table_map)

    # Column-wise tables.

    def maybe_slice_table_column(
        self, orig_config: Mapping[str, Any], column_slice_threshold: int | None, world_size: int
    ) -> list[Config]:
        """Configurations of a table's slices, in column order; one if it is not cut."""
        (table,) = read_tables([orig_config])
        slices = column_slicing.num_slices(table, column_slice_threshold, world_size)
        widths = column_slicing.slice_widths(table.output_dim, slices)
        return [{**orig_config, "output_dim": width} for width in widths]

    def create_col_sliced_configs(
        self,
        global_col_configs: Sequence[Mapping[str, Any]],
        world_size: int,
        column_slice_threshold: int | None,
        input_table_map: Sequence[int],
    ) -> tuple[list[list[Config]], list[list[int]]]:
        """Slices of each column-wise table, and the `sliced_out_ranges` if none were merged."""
        if column_slice_threshold is None and global_col_configs:
            column_slice_threshold = column_slicing.automatic_threshold(
                read_tables(global_col_configs), world_size
            )
        sliced = [
            self.maybe_slice_table_column(config, column_slice_threshold, world_size)
            for config in global_col_configs
        ]
        return sliced, _out_ranges([len(slices) for slices in sliced], input_table_map)

    def apply_strategy(
        self, strategy: str, world_size: int, sliced_configs: Sequence[Sequence[Config]]
    ) -> list[list[tuple[int, int]]]:
        """The slices of each rank, as `(table, slice)`, before those of one table are merged."""
        slices = [(t, s) for t, configs in enumerate(sliced_configs) for s in range(len(configs))]
        sizes = [
            sliced_configs[t][s]["input_dim"] * sliced_configs[t][s]["output_dim"]
            for t, s in slices
        ]
        ranks = placement.place(strategy, world_size, [t for t, _ in slices], sizes)
        return [[slices[i] for i in rank] for rank in ranks]

    apply_stragety = apply_strategy  # DMP's own spelling, which its users' code has

    def _merge_slices(
        self, rank_slices: Sequence[tuple[int, int]], sliced_configs: Sequence[Sequence[Config]]
    ) -> tuple[list[int], list[Config]]:
        """A rank's tables, each once, in order of first appearance, as wide as its slices."""
        merged: dict[int, Config] = {}
        for table, piece in rank_slices:
            config = sliced_configs[table][piece]
            if table in merged:
                merged[table]["output_dim"] += config["output_dim"]
            else:
                merged[table] = dict(config)
        return list(merged), list(merged.values())

    def _create_concat(
        self, table_configs: Sequence[Config], input_maps: Sequence[int]
    ) -> tuple[list[Config], list[int], list[int], list[list[int]], list[list[int]]]:
        """Joins a rank's tables where they agree.

        Args:
            table_configs: The rank's tables.
            input_maps: The table of each of its inputs.

        Returns:
            Configurations of the rank's layers; the layer and the row offset of each input; the
            tables and the row offsets of each layer.
        """
        groups = concat.group_tables(table_configs)
        members = [[table_configs[i] for i in group] for group in groups]
        offsets = [concat.row_offsets(configs) for configs in members]
        place = {
            table: (layer, offsets[layer][i])
            for layer, group in enumerate(groups)
            for i, table in enumerate(group)
        }
        return (
            [concat.join(configs) for configs in members],
            [place[table][0] for table in input_maps],
            [place[table][1] for table in input_maps],
            groups,
            offsets,
        )

    def _place_columns(self) -> None:
        configs = [self.global_configs[i] for i in self.table_groups[COLUMN_WISE]]
        input_map = self.map_groups[COLUMN_WISE]
        sliced, _ = self.create_col_sliced_configs(
            configs, self.world_size, self.column_slice_threshold, input_map
        )
        ranks = self.apply_strategy(self.strategy, self.world_size, sliced)
        self._check_no_rank_is_left_out(ranks, sliced, configs)

        inputs_of: list[list[int]] = [[] for _ in configs]
        for i, table in enumerate(input_map):
            inputs_of[table].append(i)
        self.table_ids: list[list[int]] = []
        self.input_ids_list: list[list[int]] = []
        self.local_configs: list[list[Config]] = []
        self.local_maps: list[list[int]] = []
        self.local_input_offsets: list[list[int]] = []
        self.local_group_list: list[list[list[int]]] = []
        self.local_weight_offsets: list[list[list[int]]] = []
        self.widths_list_flat: list[int] = []
        # Columns are dealt out in rank order, so that what a rank holds of a table is contiguous
        # even where slices that met there were not neighbours. All slices are new and alike, so
        # this is a choice of names.
        self._column_ranges: list[dict[int, tuple[int, int]]] = []
        dealt = [0] * len(configs)
        for slices in ranks:
            tables, merged = self._merge_slices(slices, sliced)
            column_ranges = {}
            for table, config in zip(tables, merged, strict=True):
                start = dealt[table]
                stop = dealt[table] = start + config["output_dim"]
                column_ranges[table] = (start, stop)
                if config["output_dim"] < configs[table]["output_dim"] and "name" in config:
                    config["name"] = f"{config['name']}_columns_{start}_{stop}"
            inputs = [(k, i) for k, table in enumerate(tables) for i in inputs_of[table]]
            layers, maps, offsets, groups, weight_offsets = self._create_concat(
                merged, [k for k, _ in inputs]
            )
            self._column_ranges.append(column_ranges)
            self.table_ids.append(tables)
            self.input_ids_list.append([i for _, i in inputs])
            self.local_configs.append(layers)
            self.local_maps.append(maps)
            self.local_input_offsets.append(offsets)
            self.local_group_list.append(groups)
            self.local_weight_offsets.append(weight_offsets)
            self.widths_list_flat += [merged[k]["output_dim"] for k, _ in inputs]
        self.rev_tp_ids = thresholds.inverse([i for ids in self.input_ids_list for i in ids])
        holders = [0] * len(configs)
        for tables in self.table_ids:
            for table in tables:
                holders[table] += 1
        self.sliced_out_ranges = _out_ranges(holders, input_map)

    def _check_no_rank_is_left_out(self, ranks, sliced, configs) -> None:
        # Replicated and row-wise tables give every rank something to do; without a threshold of
        # the user's the tables were cut as far as it helped.
        if self.column_slice_threshold is None or all(ranks) or len(configs) < len(self._tables):
            return
        if any(
            len(slices) < min(self.world_size, config["output_dim"])
            for slices, config in zip(sliced, configs, strict=True)
        ):
            idle = [rank for rank, slices in enumerate(ranks) if not slices]
            raise ValueError(
                "Not enough table after slicing to run on all worker. Try decrease "
                "column_slice_threshold or decrease worker count. Received: "
                f"column_slice_threshold={self.column_slice_threshold}, "
                f"world_size={self.world_size}, which leaves ranks {idle} without a table"
            )

    # Hash tables.

    def deal_hash_inputs(self) -> None:
        """Gives each input of a hash table to a rank: where inputs are model-parallel.

        Then `input_ids_list` holds numbers of inputs, those of hash tables behind the others of
        their rank, with which the lists beside it (`local_maps`, ...) still begin. An input goes to
        the rank with the fewest so far.
        """
        if not self.hash_configs:
            return
        numbers = self.input_groups[COLUMN_WISE]
        self.input_ids_list = [[numbers[i] for i in ids] for ids in self.input_ids_list]
        for i in self.input_groups[HASHED]:
            min(self.input_ids_list, key=len).append(i)

    # Row-wise tables.

    def create_row_sliced_configs(
        self, global_row_configs: Sequence[Mapping[str, Any]], world_size: int
    ) -> tuple[list[list[Config]], list[list[int]]]:
        """Per rank: configurations of the row-wise shards, and first rows, one per row input."""
        configs, offsets = [], []
        for rank in range(world_size):
            ranges = [row_range(c["input_dim"], rank, world_size) for c in global_row_configs]
            shards = []
            for config, (start, stop) in zip(global_row_configs, ranges, strict=True):
                shards.append({**config, "input_dim": stop - start})
                if "name" in config:
                    shards[-1]["name"] = f"{config['name']}_rows_{start}_{stop}"
            configs.append(shards)
            offsets.append([ranges[table][0] for table in self.map_groups[ROW_WISE]])
        return configs, offsets

    # The whole.

    def _make_plan(self) -> Plan:
        kinds = [COLUMN_WISE] * len(self._tables)
        columns: dict[int, int] = {}
        for kind, group in enumerate(self.table_groups):
            for position, table_id in enumerate(group):
                kinds[table_id] = kind
                columns[table_id] = position
        shards = []
        for table in self._tables:
            kind = kinds[table.table_id]
            for rank in range(self.world_size):
                rows = (0, table.input_dim)
                width: tuple[int, int] | None = (0, table.output_dim)
                if kind == ROW_WISE:
                    rows = row_range(table.input_dim, rank, self.world_size)
                elif kind == COLUMN_WISE:
                    width = self._column_ranges[rank].get(columns[table.table_id])
                if width is not None:
                    shards.append(Shard(table.table_id, rank, kind, *rows, *width))
        return Plan(
            self.world_size,
            tuple(self._tables),
            tuple(kinds),
            tuple(shards),
            tuple(self.input_table_map),
        )

    def report(
        self,
        local_batch: int = 1024,
        hotness: int | Sequence[int] = 1,
        slots_per_row: int = 0,
        element_bytes: int = 4,
        key_bytes: int = 8,
    ) -> str:
        """A table of who holds what and what a training step moves; see `report.format_report`."""
        return format_report(
            self.plan,
            local_batch=local_batch,
            hotness=hotness,
            slots_per_row=slots_per_row,
            element_bytes=element_bytes,
            key_bytes=key_bytes,
        )


def row_range(num_rows: int, rank: int, world_size: int) -> tuple[int, int]:
    """Rows `[start, stop)` of a row-wise table on a rank; the first ranks take one row more."""
    rows, longer = divmod(num_rows, world_size)
    start = rank * rows + min(rank, longer)
    return start, start + rows + (rank < longer)


def _out_ranges(num_parts: Sequence[int], input_map: Sequence[int]) -> list[list[int]]:
    """`[i, i + parts]` of each input whose table is in more than one part."""
    return [[i, i + num_parts[t]] for i, t in enumerate(input_map) if num_parts[t] > 1]


__all__ = ["DistEmbeddingStrategy", "TableConfig", "row_range"]
