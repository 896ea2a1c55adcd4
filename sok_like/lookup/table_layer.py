"""What layers over one hash table share: the table, compute dtype, the weights file of Keras 3."""

from __future__ import annotations

from typing import Any

import numpy as np
import tensorflow as tf

from sok_like.lookup import by_key as by_key  # so that its tables can be looked up by key
from sok_like.lookup.training_flag import by_training
from sok_like.runtime import comm
from sok_like.table import beside, keras_files
from sok_like.table.snapshots import RecordedSnapshot, TableSnapshot
from sok_like.table.together import restore_snapshot
from sok_like.table.variable import EmbeddingVariable
from sok_like.table.weights import owned


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
        return self.as_output(by_training(training, lookup))

    def as_output(self, rows: Any) -> Any:
        """Rows in the layer's compute dtype; without a gradient while it is frozen."""
        # Keras 2 has no compute dtype after `tf.disable_v2_behavior()`.
        return tf.cast(unless_frozen(self, rows), self.compute_dtype or tf.float32)

    def save_own_variables(self, store):
        """Content into Keras' file, or on several ranks the name of the dump beside it."""
        reference = beside.reference_of(self.table)
        if reference is not None:
            store["beside"] = np.frombuffer(reference.encode(), np.uint8)
            return
        if comm.current().world_size > 1:
            raise NotImplementedError(
                f"Table '{self.table.table_name}' is spread over {comm.current().world_size} ranks "
                "and is saved with its model: model.save('x.keras'), "
                "model.save_weights('x.weights.h5'), or by sok.Saver"
            )
        for field, value in self.table.snapshot()._asdict().items():
            # The file holds numbers only: names go in as their bytes.
            names = field == "slot_names"
            store[field] = _bytes_of_names(value.numpy()) if names else value.numpy()

    def load_own_variables(self, store):
        """The inverse of `save_own_variables`; other keys are removed."""
        if "beside" in store:
            reference = np.asarray(store["beside"]).tobytes().decode()
            beside.restore(self.table, keras_files.path_read(), reference)
            return
        # A table without policies wrote no records, and earlier versions no step and no scale.
        optional = {*RecordedSnapshot._fields} - {*TableSnapshot._fields}
        optional |= {"optimizer_step", "initial_row_scale"}
        fields = {
            field: np.asarray(store[field])
            for field in RecordedSnapshot._fields
            if field not in optional or field in store
        }
        fields["slot_names"] = _names_of_bytes(fields["slot_names"])
        restore_snapshot(self.table, **_owned(fields))


def freeze_tables(layer: Any) -> None:
    """Has the tables of a layer made with `trainable=False` say so where Keras asks them.

    They are made trainable, and so the layer trains them once its `trainable` is True.
    """
    if not layer.trainable:
        # Of the layers within, too. An assignment of what the attribute is would be left out.
        tf.keras.layers.Layer.trainable.fset(layer, False)


def unless_frozen(layer: Any, rows: Any) -> Any:
    """The rows, without a gradient while the layer's `trainable` is False."""
    return rows if layer.trainable else tf.nest.map_structure(tf.stop_gradient, rows)


def keras_arguments(kwargs: dict[str, Any]) -> dict[str, Any]:
    """Keras' own arguments of a layer, without those that it would ignore here.

    Raises:
        TypeError: `weights`, which tf_keras sets as it builds a layer; tables exist before.
    """
    if "weights" in kwargs:
        raise TypeError(
            "`weights` is not an argument of layers over hash tables: rows have keys. "
            "`sok.assign(layer.embedding_variable, keys, rows)` sets rows that were trained "
            f"elsewhere. Received: weights=... (layer {kwargs.get('name')!r})"
        )
    return kwargs


def _owned(fields):
    """What this rank owns of a table that one rank wrote."""
    if comm.current().world_size == 1:
        return fields
    mine = owned(np.ascontiguousarray(fields["keys"]))
    by_key = ("keys", "rows", "slot_rows", "records")
    kept = {name: fields[name][mine] for name in by_key if len(fields.get(name, ()))}
    if len(fields.get("waiting", ())):
        keys = np.ascontiguousarray(fields["waiting"][:, 0])
        kept["waiting"] = fields["waiting"][owned(keys)]
    return {**fields, **kept}


def _bytes_of_names(names):
    return np.frombuffer(b"\n".join(names), np.uint8)


def _names_of_bytes(array):
    return np.asarray(array.tobytes().split(b"\n") if len(array) else [], dtype=object)
