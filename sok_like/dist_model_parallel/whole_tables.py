"""Weights of a distributed layer, and their optimizer state, as whole tables."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sok_like.dist_model_parallel import exported, optimizer_state
from sok_like.dist_model_parallel.local_layers import layer_table
from sok_like.dist_model_parallel.weights import Held, get_tables, set_tables
from sok_like.lookup import exporting
from sok_like.planner.tables import HASHED
from sok_like.runtime.ranks import comm


class WholeTables:
    """The part of `DistributedEmbedding` that reads and writes whole tables.

    All methods are collective and eager. They make the layer's variables if they do not exist yet.
    """

    strategy: Any
    _shards: Any
    build: Any
    _is_mine: Any
    _layers_here: Any

    def get_weights(self, all_ranks: bool = False) -> list[Any]:
        """The whole tables; every rank must call this.

        Args:
            all_ranks: True returns them on all ranks, False on rank 0 only.

        Returns:
            One array `[input_dim, output_dim]` per embedding, in the order of `embeddings`; for a
            hash table a pair of ascending keys `[num_keys]` and rows `[num_keys, output_dim]`. On
            the other ranks an empty list.
        """
        self.build()
        return get_tables(self._held(), bool(all_ranks))

    def set_weights(
        self, weights: Sequence[Any], chunk: int = 134217728, use_lock: bool = False
    ) -> None:
        """Sets the tables; every rank must call this, with the same weights.

        Args:
            weights: One array `[input_dim, output_dim]` per embedding, in the order of
                `embeddings`, or the path of its `.npy` file, from which each rank reads only its
                shard. For a hash table a pair of keys and rows; it then holds exactly these keys.
            chunk: Number of elements to copy at a time, rounded down to whole rows, at least one.
            use_lock: True: one rank at a time.

        Raises:
            ValueError: on any rank a number of weights or a shape is wrong, a key is a duplicate,
                or there are more keys than a rank's capacity; all ranks raise, and nothing has
                changed.
        """
        self.build()
        set_tables(self._held(), weights, chunk, bool(use_lock))

    def get_optimizer_state(self, optimizer: Any, all_ranks: bool = False) -> dict[str, Any]:
        """The optimizer's state of the whole tables; every rank must call this.

        Args:
            optimizer: The optimizer of the tables, of Keras 3 or tf_keras, wrapped or not.
            all_ranks: True returns the state on all ranks, False on rank 0 only.

        Returns:
            `"iterations"`, the number of steps, and `"tables"`, one dictionary per embedding from
            the name of a slot variable (`"momentums"`, `"accumulators"`, ...) to an array
            `[input_dim, output_dim]`; for a hash table to a pair of ascending keys `[num_keys]` and
            slot rows `[num_keys, width]`. On the other ranks an empty dictionary.

        Raises:
            ValueError: the optimizer does not know a table, on any rank; all ranks raise.
        """
        self.build()
        return optimizer_state.get_state(self._held(), optimizer, bool(all_ranks))

    def set_optimizer_state(
        self, optimizer: Any, state: Any, chunk: int = 134217728, use_lock: bool = False
    ) -> None:
        """Sets the optimizer's state of the tables; every rank must call this, with the same state.

        Args:
            optimizer: The optimizer of the tables, already built: `optimizer.build(variables)`.
            state: The result of `get_optimizer_state`; paths of `.npy` files may replace arrays.
                The keys of a hash table must be those that it holds, so set weights first.
            chunk, use_lock: As in `set_weights`.

        Raises:
            ValueError: structure, slot variables, shapes or keys are wrong on any rank; all ranks
                raise, and nothing has changed.
        """
        self.build()
        optimizer_state.set_state(self._held(), optimizer, state, chunk, bool(use_lock))

    def spread_for_export(self) -> dict[str, exporting.Spread]:
        """This layer's dense tables that `sok.export_saved_model` replaces."""
        self.build()
        return exported.spread_tables(self) if comm.current().world_size > 1 else {}

    def _held(self) -> Held:
        """What this rank holds, as Keras' variables; hash tables as EmbeddingVariables."""
        layers, places = self._layers_here(), {}
        for table_id, shards in enumerate(self._shards):
            for shard in shards:
                layer = layers.get((shard.kind, shard.position))
                if self._is_mine(shard) and layer is not None:
                    weight = layer_table(layer) if shard.kind == HASHED else layer.weights[0]
                    places[table_id] = weight, shard.row_offset
        return Held(self.strategy.plan, places)
