"""What SOK's two layers share: their table, their configuration, their compute dtype."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf

from sok_like.keras_variable import as_weight
from sok_like.lookup import check_gradient_scale
from sok_like.snapshots import TableSnapshot
from sok_like.variable import EmbeddingVariable


def by_training(training: Any, function: Callable[[bool], Any]) -> Any:
    """`function(training)` with a Python bool.

    `training` may be a tensor in graphs of tf_keras; then both branches are built.
    """
    if tf.is_tensor(training):
        static = tf.get_static_value(training)
        if static is None:
            return tf.cond(
                tf.cast(training, tf.bool), lambda: function(True), lambda: function(False)
            )
        training = static
    return function(bool(training))


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

    def run(self, training: Any, lookup: Any) -> Any:
        """`lookup(training)` with a Python bool, in the layer's compute dtype."""
        return tf.cast(by_training(training, lookup), self.compute_dtype)

    def save_own_variables(self, store):
        """Keras 3: keys, rows and slot rows into the weights file."""
        self._require_whole_table("saved in")
        for field, value in zip(self._snapshot_fields, self.table.snapshot(), strict=True):
            # The file holds numbers only: names go in as their bytes.
            names = field == "slot_names"
            store[field] = _bytes_of_names(value.numpy()) if names else value.numpy()

    def load_own_variables(self, store):
        """Keras 3: the inverse of `save_own_variables`; other keys are removed."""
        self._require_whole_table("loaded from")
        fields = {field: np.asarray(store[field]) for field in self._snapshot_fields}
        fields["slot_names"] = _names_of_bytes(fields["slot_names"])
        self.table.load_snapshot(**fields)

    _snapshot_fields = TableSnapshot._fields

    def _require_whole_table(self, verb):
        from sok_like import comm

        if comm.current().world_size > 1:
            raise NotImplementedError(
                f"Table '{self.table.table_name}' is spread over {comm.current().world_size} ranks "
                f"and cannot be {verb} one process's weights file; use sok.Saver, which gathers it."
            )


class EmbeddingLayer(TableLayer):
    """A layer over one table of its own, named after the layer.

    Args:
        max_vocabulary_size_per_gpu: Most keys a rank may hold; None grows without bound.
        embedding_vec_size: Row width.
        slot_num: Feature fields of a sample; all share the table, so keys tell them apart.
        use_hashtable: False: keys are row indices in `[0, max_vocabulary_size_per_gpu * ranks)`.
        key_dtype: int64, int32, uint64 or uint32.
        embedding_initializer: Keras initializer or its name; uniform in [-0.05, 0.05] by default.
        gradient_scale: "sum" over ranks, or "mean": see `sok_like.lookup.lookup`.
        **kwargs: Keras' own: `name`, `dtype`, `trainable`.
    """

    def __init__(
        self,
        *,
        max_vocabulary_size_per_gpu: int | None,
        embedding_vec_size: int,
        slot_num: int,
        use_hashtable: bool = True,
        key_dtype: Any = tf.int64,
        embedding_initializer: Any = None,
        gradient_scale: str = "sum",
        **kwargs: Any,
    ):
        super().__init__(**kwargs)
        check_positive("slot_num", slot_num)
        check_positive("embedding_vec_size", embedding_vec_size)
        if max_vocabulary_size_per_gpu is not None:
            check_positive("max_vocabulary_size_per_gpu", max_vocabulary_size_per_gpu)
        self.max_vocabulary_size_per_gpu = max_vocabulary_size_per_gpu
        self.embedding_vec_size = embedding_vec_size
        self.slot_num = slot_num
        self.use_hashtable = use_hashtable
        self.key_dtype = tf.as_dtype(key_dtype)
        self.embedding_initializer = tf.keras.initializers.get(
            "random_uniform" if embedding_initializer is None else embedding_initializer
        )
        self.gradient_scale = check_gradient_scale(gradient_scale)
        # XLA cannot compile the table's ops; Keras 3 asks before it tries.
        self.supports_jit = False
        self._weight = as_weight(
            EmbeddingVariable(
                embedding_vec_size,
                name=self.name,
                key_dtype=self.key_dtype,
                initializer=self.embedding_initializer,
                capacity=max_vocabulary_size_per_gpu,
                use_hashtable=use_hashtable,
                trainable=self.trainable,
            )
        )
        self.built = True

    def build(self, input_shape=None):
        # The table needs no shape; Keras only wants to be told.
        self.built = True

    def get_config(self):
        return {
            **super().get_config(),
            "max_vocabulary_size_per_gpu": self.max_vocabulary_size_per_gpu,
            "embedding_vec_size": self.embedding_vec_size,
            "slot_num": self.slot_num,
            "use_hashtable": self.use_hashtable,
            "key_dtype": self.key_dtype.name,
            "embedding_initializer": tf.keras.initializers.serialize(self.embedding_initializer),
            "gradient_scale": self.gradient_scale,
        }


def _bytes_of_names(names):
    return np.frombuffer(b"\n".join(names), np.uint8)


def _names_of_bytes(array):
    return np.asarray(array.tobytes().split(b"\n") if len(array) else [], dtype=object)


def check_positive(argument: str, value: Any) -> None:
    """ValueError unless `value` is an integer >= 1."""
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f"`{argument}` must be a positive integer. Received: {argument}={value!r}")
