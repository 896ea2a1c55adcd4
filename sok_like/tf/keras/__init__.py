"""Holds `optimizers`."""

from sok_like.tf.keras import optimizers as optimizers
