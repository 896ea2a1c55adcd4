"""What a distributed layer holds as whole tables: its weights, and an optimizer's state of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sok_like.dist_model_parallel import optimizer_state
from sok_like.dist_model_parallel.local_layers import layer_table
from sok_like.dist_model_parallel.weights import get_tables, set_tables
from sok_like.lookup.dense_lookup import as_tf_table
from sok_like.planner.tables import HASHED


class WholeTables:
    """The part of `DistributedEmbedding` that gives tables out and takes them in.

    All of it is collective and eager. The layer makes its variables if it was not called yet.
    """

    strategy: Any
    _parts: Any
    build: Any
    _is_mine: Any
    _layers_here: Any

    def get_weights(self, all_ranks: bool = False) -> list[Any]:
        """The tables, whole; every rank must call this.

        Args:
            all_ranks: True returns them on all ranks, False on rank 0 only.

        Returns:
            An array `[input_dim, output_dim]` an embedding, in the order of `embeddings`; for a
            hash table a pair, keys `[n]`, ascending, and rows `[n, output_dim]`. On the other ranks
            an empty list.
        """
        self.build()
        return get_tables(self.strategy.plan, self._shards_here(), bool(all_ranks))

    def set_weights(
        self, weights: Sequence[Any], chunk: int = 134217728, use_lock: bool = False
    ) -> None:
        """Sets the tables; every rank must call this, with the same weights.

        Args:
            weights: An array `[input_dim, output_dim]` an embedding, in the order of `embeddings`,
                or the path of an `.npy` file of one, of which only what this rank holds is read;
                for a hash table a pair of those. It then holds these keys and no others.
            chunk: Elements to copy at a time, rounded down to whole rows, of which it is at least
                one.
            use_lock: True lets one rank at a time do it.

        Raises:
            ValueError: another number of weights or another shape, a key twice, or more keys than a
                rank's capacity, on any rank; raised on all ranks, before anything is changed.
        """
        self.build()
        set_tables(self.strategy.plan, self._shards_here(), weights, chunk, bool(use_lock))

    def get_optimizer_state(self, optimizer: Any, all_ranks: bool = False) -> dict[str, Any]:
        """The optimizer's state of the tables, whole; every rank must call this.

        Args:
            optimizer: What trains them, of Keras 3 or tf_keras, wrapped or not.
            all_ranks: True returns it on all ranks, False on rank 0 only.

        Returns:
            `"iterations"`, the number of steps, and `"tables"`, a dictionary an embedding from the
            name of a slot variable (`"momentums"`, `"accumulators"`, ...) to an array
            `[input_dim, output_dim]`; for a hash table to a pair of keys `[n]`, ascending, and slot
            rows `[n, width]`. On the other ranks an empty dictionary.

        Raises:
            ValueError: the optimizer does not know a table, on any rank; raised on all ranks.
        """
        self.build()
        places = self._weights_here()
        return optimizer_state.get_state(self.strategy.plan, places, optimizer, bool(all_ranks))

    def set_optimizer_state(
        self, optimizer: Any, state: Any, chunk: int = 134217728, use_lock: bool = False
    ) -> None:
        """Sets the optimizer's state of the tables; every rank must call this, with the same state.

        Args:
            optimizer: What will train them, built already: `optimizer.build(variables)`.
            state: As `get_optimizer_state` gives it; the arrays may be paths of `.npy` files. A
                hash table's keys must be those it holds, so set weights first.
            chunk, use_lock: As those of `set_weights`.

        Raises:
            ValueError: another structure, other slot variables, shapes or keys, on any rank;
                raised on all ranks, before anything is changed.
        """
        self.build()
        plan, places = self.strategy.plan, self._weights_here()
        optimizer_state.set_state(plan, places, optimizer, state, chunk, bool(use_lock))

    def _weights_here(self):
        """By table: this rank's Keras variable, and the row of it where the shard begins."""
        layers, places = self._layers_here(), {}
        for table_id, parts in enumerate(self._parts):
            for part in parts:
                layer = layers.get((part.kind, part.position))
                if self._is_mine(part) and layer is not None:
                    weight = layer_table(layer) if part.kind == HASHED else layer.weights[0]
                    places[table_id] = weight, part.row_offset
        return places

    def _shards_here(self):
        """By table: this rank's TensorFlow variable, and the row of it where the shard begins."""
        places = self._weights_here()
        return {i: (as_tf_table(weight), row) for i, (weight, row) in places.items()}
