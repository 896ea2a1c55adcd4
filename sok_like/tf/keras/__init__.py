"""Holds `mixed_precision` and `optimizers`."""

from sok_like.tf.keras import mixed_precision as mixed_precision
from sok_like.tf.keras import optimizers as optimizers
