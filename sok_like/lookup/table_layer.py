"""What layers over one hash table share: the table, compute dtype, the weights file of Keras 3."""

from __future__ import annotations

from typing import Any

import numpy as np
import tensorflow as tf

from sok_like.lookup import by_key as by_key  # so that its tables can be looked up by key
from sok_like.lookup.training_flag import by_training
from sok_like.runtime import comm
from sok_like.table.snapshots import RecordedSnapshot, TableSnapshot
from sok_like.table.variable import EmbeddingVariable


class TableLayer(tf.keras.layers.Layer):
    """A layer over one table, which a subclass puts into `_weight`."""

    _weight: Any  # no value here: tf_keras tracks no attribute that the class has

    @property
    def embedding_variable(self) -> Any:
        """The layer's EmbeddingVariable, as it appears among its `trainable_variables`."""
        return self._weight

    @property
    def table(self) -> EmbeddingVariable:
        """The layer's EmbeddingVariable itself, under either Keras."""
        return getattr(self._weight, "_embedding_variable", self._weight)

    @classmethod
    def from_config(cls, config):
        try:
            return super().from_config(config)
        except TypeError as error:
            # Keras prints the whole configuration first, again at each level of a model, and the
            # cause last. It passes a ValueError on as it is.
            cause = error.__context__ or error
            raise ValueError(
                f"{cls.__name__} '{config.get('name')}' cannot be made from its configuration: "
                f"{cause}"
            ) from cause

    def run(self, training: Any, lookup: Any) -> Any:
        """`lookup(training)` with a Python bool, in the layer's compute dtype."""
        # Keras 2 has none after `tf.disable_v2_behavior()`.
        return tf.cast(by_training(training, lookup), self.compute_dtype or tf.float32)

    def save_own_variables(self, store):
        """Keras 3: keys, rows, slot rows and what policies know into the weights file."""
        self._require_whole_table("saved in")
        for field, value in self.table.snapshot()._asdict().items():
            # The file holds numbers only: names go in as their bytes.
            names = field == "slot_names"
            store[field] = _bytes_of_names(value.numpy()) if names else value.numpy()

    def load_own_variables(self, store):
        """Keras 3: the inverse of `save_own_variables`; other keys are removed."""
        self._require_whole_table("loaded from")
        # A table without policies wrote no records, and earlier versions no step.
        optional = {*RecordedSnapshot._fields} - {*TableSnapshot._fields} | {"optimizer_step"}
        fields = {
            field: np.asarray(store[field])
            for field in RecordedSnapshot._fields
            if field not in optional or field in store
        }
        fields["slot_names"] = _names_of_bytes(fields["slot_names"])
        self.table.load_snapshot(**fields)

    def _require_whole_table(self, verb):
        if comm.current().world_size > 1:
            raise NotImplementedError(
                f"Table '{self.table.table_name}' is spread over {comm.current().world_size} ranks "
                f"and cannot be {verb} one process's weights file; use sok.Saver, which gathers it."
            )


def _bytes_of_names(names):
    return np.frombuffer(b"\n".join(names), np.uint8)


def _names_of_bytes(array):
    return np.asarray(array.tobytes().split(b"\n") if len(array) else [], dtype=object)
