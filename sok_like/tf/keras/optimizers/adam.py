"""`sok.tf.keras.optimizers.adam.Adam`."""

from sok_like.optimizers.adam import Adam as Adam

__all__ = ["Adam"]
