"""`dmp.DistributedEmbedding`: a list of Keras embeddings, sharded over the ranks."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from sok_like.dist_model_parallel import dense_tables, local_layers, mp_input
from sok_like.dist_model_parallel.dense_tables import DenseTables
from sok_like.dist_model_parallel.embedding import output_symbol
from sok_like.dist_model_parallel.whole_tables import WholeTables
from sok_like.lookup import exchange, exporting
from sok_like.lookup.dense_lookup import as_tf_table, check_ids
from sok_like.lookup.ids import FlatIds, mask_of
from sok_like.lookup.keras_call import by_training
from sok_like.lookup.local_variables import mark_local, unique_in_graph
from sok_like.lookup.table_layer import ConfiguredLayer
from sok_like.planner import DistEmbeddingStrategy
from sok_like.planner.placement import check_threshold
from sok_like.planner.tables import (
    COLUMN_WISE,
    DATA_PARALLEL,
    HASHED,
    ROW_WISE,
    Shard,
    list_embeddings,
)
from sok_like.runtime.checks import as_list, unmet
from sok_like.runtime.ranks import comm, exchange_order
from sok_like.runtime.ranks.initialize import ensure_initialized
from sok_like.runtime.ranks.lookup_options import check_row_dtype
from sok_like.saving.containers import tables_in_checkpoints
from sok_like.table.variable import unwrap


# A package name of its own, because `sok.DistributedEmbedding` has the same class name.
@tf.keras.utils.register_keras_serializable(package="sok_like.dist_model_parallel")
class DistributedEmbedding(WholeTables, ConfiguredLayer):
    """Looks up several inputs in several tables that are sharded over ranks.

    It replaces a list of embeddings: on any number of ranks, `outputs = layer(inputs)` is what
    `[e(i) for e, i in zip(embeddings, inputs)]` would be in one process. Without `sok.Init` it
    initialises the package itself.

    Args:
        embeddings: Keras `Embedding`s or `sok_like.Embedding`s, or other layers with `input_dim`,
            `output_dim` and perhaps `combiner` in their configuration, and with one weight, the
            table. They only describe tables: new tables are made, and of other layer classes only
            `build` is called, never `call`. `sok_like.HashEmbedding`s may be among them: key k is
            on rank `k % world_size`, whatever the strategy and thresholds.
        strategy: "basic", "memory_balanced" or "memory_optimized": which rank gets which table.
        column_slice_threshold, row_slice_threshold, data_parallel_threshold, input_table_map: As in
            `DistEmbeddingStrategy`.
        dp_input: True: each rank passes all inputs, for its own samples. False: each rank passes
            the inputs `layer.strategy.input_ids_list[rank]`, for the samples of all ranks; each
            rank has the same number of samples. Then `row_slice_threshold` and
            `data_parallel_threshold` are ignored, and each input of a hash table also belongs to
            one rank. On several ranks inputs without a combiner must be dense, `[global_batch]` or
            `[global_batch, hotness]`, and all of one kind within a `tf.function`.
        wire_dtype: As in `sok.GroupEmbedding`. Rows of replicated tables do not travel.
        **kwargs: Keras' own: `name`, `dtype`, `trainable`.

    Call arguments:
        inputs: A list of integer tensors in any mixture of dense, ragged and sparse, as in
            `sok_like.Embedding`. The batch may differ between ranks, and be empty.
        training: True inserts missing keys into hash tables. False reads their initial rows and
            inserts no keys.

    Returns:
        One output per input, in input order, each with the shape that the embedding alone would
        give, in the layer's compute dtype. The gradient of a table that is not replicated goes to
        its owner only, summed over ranks and divided by their number; see
        `DistributedGradientTape`.

    Raises:
        ValueError: an argument is out of range, or the number of inputs is wrong.
        TypeError: an input has no integers.
        tf.errors.InvalidArgumentError: an id is outside its table, or a hash table is full; on all
            ranks, naming table, id and rank.

    Attributes:
        strategy: The `DistEmbeddingStrategy`; `strategy.report()` says which rank owns what.
        dp_layers, local_embedding_layers, row_layers, hash_layers: The layers that hold this rank's
            variables.
        dense_in_files: Its dense tables, as seen by checkpoints and Keras' files.
        not_in_files: Attributes that Keras' files leave out.
    """

    _arguments = (
        *("column_slice_threshold", "row_slice_threshold", "dp_input", "data_parallel_threshold"),
        "wire_dtype",
    )

    def __init__(
        self,
        embeddings: Sequence[Any],
        strategy: str = "basic",
        column_slice_threshold: int | None = None,
        row_slice_threshold: int | None = None,
        dp_input: bool = True,
        input_table_map: Sequence[int] | None = None,
        data_parallel_threshold: int | None = None,
        wire_dtype: Any = None,
        **kwargs: Any,
    ):
        super().__init__(**kwargs)
        ensure_initialized()
        communicator = comm.current()
        self.rank, self.world_size = communicator.rank, communicator.world_size
        self.dp_input = bool(dp_input)
        self.column_slice_threshold = column_slice_threshold
        self.row_slice_threshold = row_slice_threshold
        self.data_parallel_threshold = data_parallel_threshold
        self.wire_dtype = check_row_dtype(wire_dtype, f"layer '{self.name}'")
        self._strategy_name = strategy
        if not dp_input:  # ignored then, but checked
            check_threshold("row_slice_threshold", row_slice_threshold, 0)
            check_threshold("data_parallel_threshold", data_parallel_threshold, 0)
        descriptions = list_embeddings(embeddings)
        local_layers.check_descriptions(descriptions, bool(dp_input) or self.world_size == 1)
        given = (descriptions, self.world_size, strategy, input_table_map, column_slice_threshold)
        thresholds = (row_slice_threshold, data_parallel_threshold) if dp_input else ()
        placement = DistEmbeddingStrategy(*given, *thresholds)
        if not dp_input:
            placement.deal_hash_inputs()
        tables = local_layers.lookup_tables(placement.plan)
        self.__dict__.update(  # bypasses Keras' tracking, of the embeddings as sublayers
            _descriptions=descriptions,
            strategy=placement,
            dense_in_files=DenseTables(self),
            _tables_of_inputs=[tables[i] for i in placement.plan.input_table_map],
        )
        self.supports_masking = any(table.masked_id is not None for table in tables)
        self.dp_layers: list[Any] = []
        self.local_embedding_layers: list[Any] = []
        self.row_layers: list[Any] = []
        self.hash_layers: list[Any] = []
        self._anchor: Any = None  # the empty variable of a rank that has no other one

    # Variables.

    def build(self, input_shape=None):
        """Makes this rank's variables, which do not depend on inputs."""
        if self.built:
            return
        strategy = self.strategy
        self.dp_layers = [local_layers.build_layer(config) for config in strategy.dp_configs]
        vary = self.rank if self.world_size > 1 else 0
        first_rows = strategy.local_weight_offsets[self.rank]
        self.local_embedding_layers = [
            local_layers.build_layer(config, [b - a for a, b in itertools.pairwise(offsets)], vary)
            for config, offsets in zip(strategy.local_configs[self.rank], first_rows, strict=True)
        ]
        shards = [c for c in strategy.row_sliced_configs[self.rank] if c["input_dim"] > 0]
        self.row_layers = [local_layers.build_layer(config, (), vary) for config in shards]
        # Initial rows of a hash table depend on the key, so all ranks use the same seed.
        self.hash_layers = [local_layers.build_layer(config) for config in strategy.hash_configs]
        if self.world_size > 1:
            # Otherwise ranks have other numbers of variables, and variables of other tables.
            shards = itertools.chain(*strategy.row_sliced_configs)
            by_rows = all(config["input_dim"] for config in shards)
            by_rows = by_rows and not strategy.table_groups[COLUMN_WISE]
            here = self.shards_here()
            for shard, layer in here.values():
                if shard.kind != DATA_PARALLEL:
                    mark_local(layer.weights[0], by_rows or shard.kind == HASHED)
            used = {t.table_id for t in self._tables_of_inputs if t.kind != DATA_PARALLEL}
            held = [layer for i, (_, layer) in here.items() if i in used]
            if used and not any(layer.trainable_weights for layer in held):
                # Other ranks' tapes record an exchange that this rank's tape would miss.
                self._anchor = self.add_weight(
                    name="anchor", shape=(0, 1), dtype="float32", initializer="zeros"
                )
                mark_local(self._anchor, by_rows)
        self.built = True

    def shards_here(self) -> dict[int, tuple[Shard, Any]]:
        """By number of the table: this rank's shards, with their layers; no empty ones."""
        by_kind = {
            DATA_PARALLEL: self.dp_layers,
            COLUMN_WISE: self.local_embedding_layers,
            ROW_WISE: self.row_layers,
            HASHED: self.hash_layers,
        }
        shards = self.strategy.plan.shards_on(self.rank)
        held = [shard for shard in shards if shard.num_rows or shard.kind == HASHED]
        return {shard.table_id: (shard, by_kind[shard.kind][shard.layer]) for shard in held}

    def _trackable_children(self, save_type="checkpoint", **kwargs):
        children = super()._trackable_children(save_type, **kwargs)
        if save_type != "checkpoint" or not tf.compat.v1.executing_eagerly_outside_functions():
            return children
        # Only what ranks have in common; of dense tables each rank has its own part.
        named = tables_in_checkpoints.by_name(children)
        tables = [unwrap(table) for table in named.values()]
        layers = {f"hash_layer-{i}": layer for i, layer in enumerate(self.hash_layers)}
        unnamed = {name: layer for name, layer in layers.items() if layer.table not in tables}
        return {"dense_tables": self.dense_in_files, **named, **unnamed}

    # In Keras' files the layer itself writes its tables, whichever layers hold them.
    not_in_files = ("dp_layers", "local_embedding_layers", "row_layers", "_descriptions",
                    "hash_layers")  # fmt: skip

    @property
    def tables_in_files(self):
        """The hash tables."""
        return [layer.table for layer in self.hash_layers]

    # Lookup.

    def call(self, inputs, training=None):
        tensors = []
        for i, x in enumerate(as_list(inputs)):
            try:
                tensors.append(x if tf.is_tensor(x) else tf.convert_to_tensor(x))
            except (TypeError, ValueError) as error:
                required = "be a list of integer tensors, one per input"
                received, of = f"inputs[{i}]={x!r}", f"layer '{self.name}'"
                raise unmet("`inputs`", required, received, of, TypeError) from error
        self._check_count(len(tensors))
        if not self.hash_layers:
            return self._outputs(tensors, False)
        return by_training(training, lambda training: self._outputs(tensors, training))

    def _outputs(self, inputs, training):
        export = exporting.current()
        if export is None and self.world_size > 1:
            dense_tables.refuse_shards(self)  # now Keras has made all variables
        here = self.shards_here()
        of_layers = {id(layer): local_layers.layer_table(layer) for _, layer in here.values()}
        variables = {table_id: of_layers[id(layer)] for table_id, (_, layer) in here.items()}
        if export is not None and self.world_size > 1:
            whole = export.of_holder(self)
            outputs = dense_tables.export_outputs(self, inputs, whole, variables)
        elif not self.dp_input and self.world_size > 1:
            outputs = mp_input.mp_input_lookup(self, inputs, variables, training)
        else:
            outputs = self._lookup(self._in_input_order(inputs), variables, training)
        return [tf.cast(output, self.compute_dtype) for output in outputs]

    def _check_count(self, received):
        of_rank = self.strategy.input_ids_list[self.rank]
        expected = len(self._tables_of_inputs if self.dp_input else of_rank)
        if received != expected:
            whose = "all inputs" if self.dp_input else f"the inputs of rank {self.rank}"
            raise ValueError(
                f"Expect {expected} inputs, got {received}: `inputs` must be a list of {whose} "
                f"(layer '{self.name}')"
            )

    def _lookup(self, inputs, variables, training):
        flat = [self.flatten(i, ids) for i, ids in enumerate(inputs)]
        here, travelling, are_here = [], [], []
        for table, samples in zip(self._tables_of_inputs, flat, strict=True):
            are_here.append(self.world_size == 1 or table.kind == DATA_PARALLEL)
            features = [self.feature(table, samples, variables, shard) for shard in table.shards]
            (here if are_here[-1] else travelling).extend(features)
        travelled, checks = [], []
        if self.world_size > 1:
            # A wrong id of a replicated table must raise on all ranks, not on this one only.
            here, problems = exchange.in_range(here)
            name = unique_in_graph(self.name)
            if travelling:
                anchor = as_tf_table(self._anchor)
                how = exchange.Exchange(name, training, anchor, wire_dtype=self.wire_dtype)
                travelled = exchange.exchange_lookup(travelling, how, problems)
            else:
                nothing = tf.zeros([0], tf.int64)
                checks = exchange_order.exchange_notes(nothing, comm.current(), name, problems)
            with tf.control_dependencies(checks):
                here = [dataclasses.replace(f, keys=tf.identity(f.keys)) for f in here]
        rows = iter(travelled)
        rows_here = iter(exchange.lookup_here(here, training, self.name))
        outputs = []
        for table, samples, is_here in zip(self._tables_of_inputs, flat, are_here, strict=True):
            columns = [next(rows_here if is_here else rows) for _ in table.shards]
            joined = columns[0] if len(columns) == 1 else tf.concat(columns, -1)
            outputs.append(samples.restore(joined))
        return outputs

    # For all kinds of lookups.

    def feature(
        self,
        table: local_layers.LookupTable,
        samples: FlatIds,
        variables: dict[int, Any],
        shard: Shard | None = None,
    ) -> exchange.ShardFeature:
        """The feature that looks samples up in a shard of a table, by default this rank's."""
        shard = shard or table.shard_of(self.rank)
        owner = table.owner(shard)
        is_here = owner in (self.rank, exchange.ALL_RANKS, exchange.BY_KEY)
        return exchange.ShardFeature(
            keys=samples.ids,
            row_splits=samples.row_splits,
            combiner=samples.combiner,
            table_name=table.name,
            key_limit=table.num_rows,
            dim=shard.num_columns,
            owner=owner,
            row_offset=shard.first_row,
            variable=variables.get(table.table_id) if is_here else None,
        )

    def flatten(self, i: int, ids: Any) -> FlatIds:
        """Checks input i and returns its flat ids."""
        table = self._tables_of_inputs[i]
        check_ids(ids, table.combiner, table.name)
        return FlatIds(ids, table.combiner, table.kind == HASHED, table.pad_key)

    # Keras.

    def compute_mask(self, inputs, mask=None):
        """One mask per input, in input order, or None: as the embeddings alone would give."""
        if not self.supports_masking:
            return None
        ids = self._in_input_order(as_list(inputs))
        tables = self._tables_of_inputs
        return [mask_of(x, table.masked_id) for table, x in zip(tables, ids, strict=True)]

    def _in_input_order(self, inputs):
        """All inputs. With dp_input=False, one rank takes them table after table."""
        if self.dp_input:
            return inputs
        placed = dict(zip(self.strategy.input_ids_list[0], inputs, strict=True))
        return [placed[i] for i in range(len(inputs))]

    def compute_output_shape(self, input_shape):
        return [
            (*(tuple(shape) if table.combiner is None else tuple(shape)[:-1]), table.dim)
            for table, shape in zip(self._tables_of_inputs, input_shape, strict=True)
        ]

    def compute_output_spec(self, inputs, training=None):
        """Keras 3: the output of `call` for symbolic inputs."""
        inputs = as_list(inputs)
        self._check_count(len(inputs))
        if not self.dp_input and self.world_size > 1:
            shapes = mp_input.output_shapes(self, inputs)
            return [tf.keras.KerasTensor(shape, dtype=self.compute_dtype) for shape in shapes]
        inputs = self._in_input_order(inputs)
        shapes = self.compute_output_shape([x.shape for x in inputs])
        return [
            output_symbol(x, table.combiner, shape, self.compute_dtype, table.name)
            for table, x, shape in zip(self._tables_of_inputs, inputs, shapes, strict=True)
        ]

    def get_config(self):
        return {
            **super().get_config(),
            "embeddings": [tf.keras.layers.serialize(layer) for layer in self._descriptions],
            "strategy": self._strategy_name,
            "input_table_map": list(self.strategy.input_table_map),
        }

    @classmethod
    def from_config(cls, config):
        layers = [tf.keras.layers.deserialize(each) for each in config["embeddings"]]
        return super().from_config({**config, "embeddings": layers})
