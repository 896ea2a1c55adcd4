"""A table that a layer of several tables holds: a layer of its own, for Keras to save and load."""

from __future__ import annotations

from sok_like.lookup.table_layer import TableLayer
from sok_like.table.keras_variable import as_weight
from sok_like.table.variable import EmbeddingVariable


class HeldTable(TableLayer):
    """Puts `variable` among the weights of the layer that holds this one as an attribute.

    An attribute by itself, not in a container: tf.train.Checkpoint follows a layer's attributes
    under Keras 3, not its lists and dictionaries.
    """

    def __init__(self, variable: EmbeddingVariable, name: str):
        super().__init__(name=name.replace("/", "_"))
        self._weight = as_weight(variable)
        self.built = True
