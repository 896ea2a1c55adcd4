"""A layer that holds one table: a layer of several tables has one for each, which Keras saves."""

from __future__ import annotations

from sok_like.lookup.table_layer import TableLayer
from sok_like.table.keras_variable import as_weight
from sok_like.table.variable import EmbeddingVariable


class HeldTable(TableLayer):
    """Adds `variable` to the weights of the layer that has this one as an attribute.

    It must be an attribute itself, not in a container: under Keras 3 tf.train.Checkpoint follows a
    layer's attributes, but not its lists and dictionaries.
    """

    def __init__(self, variable: EmbeddingVariable, name: str):
        super().__init__(name=name.replace("/", "_"))
        self._weight = as_weight(variable)
        self.built = True
