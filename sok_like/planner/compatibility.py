"""Parallel lists that DMP's strategy publishes; only programs of its users read them.

This package reads `Plan` instead. All of these lists follow from the strategy's other attributes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sok_like.planner import thresholds
from sok_like.planner.tables import COLUMN_WISE

Config = dict[str, Any]


class CompatibilityLists:
    """The part of `DistEmbeddingStrategy` that only compatibility needs.

    Attributes:
        local_maps: Per rank, the layer of each of its inputs.
        local_input_offsets: Per rank, what to add to the keys of each of its inputs.
        widths_list_flat: Columns of the output of each input of each rank, in rank order: the
            widths of what an exchange receives.
        rev_tp_ids: Positions that bring those outputs into input order, slices in column order.
        sliced_out_ranges: In that order, `[i, i + n]` if input i has n slices and all inputs before
            it are already concatenated.
        row_inputs_offsets: Per rank, first row of the shard that each row-wise input looks up.
    """

    map_groups: list[list[int]]
    table_ids: list[list[int]]
    input_ids_list: list[list[int]]
    local_configs: list[list[Config]]
    local_group_list: list[list[list[int]]]
    local_weight_offsets: list[list[list[int]]]
    row_inputs_offsets: list[list[int]]

    def _fill_compatibility_lists(self) -> None:
        """Sets the lists of the column-wise tables, once these are placed."""
        input_map = self.map_groups[COLUMN_WISE]
        self.local_maps: list[list[int]] = []
        self.local_input_offsets: list[list[int]] = []
        self.widths_list_flat: list[int] = []
        for rank, tables in enumerate(self.table_ids):
            layers, offsets = self.local_configs[rank], self.local_weight_offsets[rank]
            places = {
                tables[position]: (layer, offsets[layer][i])
                for layer, group in enumerate(self.local_group_list[rank])
                for i, position in enumerate(group)
            }
            inputs = [places[input_map[i]] for i in self.input_ids_list[rank]]
            self.local_maps.append([layer for layer, _ in inputs])
            self.local_input_offsets.append([offset for _, offset in inputs])
            self.widths_list_flat += [layers[layer]["output_dim"] for layer, _ in inputs]
        self.rev_tp_ids = thresholds.inverse([i for ids in self.input_ids_list for i in ids])
        held = [table for tables in self.table_ids for table in tables]
        num_slices = [held.count(table) for table in range(len(set(held)))]
        self.sliced_out_ranges = out_ranges(num_slices, input_map)


def out_ranges(num_slices: Sequence[int], input_map: Sequence[int]) -> list[list[int]]:
    """`[i, i + n]` of each input i whose table has n > 1 slices."""
    return [[i, i + num_slices[t]] for i, t in enumerate(input_map) if num_slices[t] > 1]
