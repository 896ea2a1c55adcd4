"""`sok.tf.keras.optimizers.adam.Adam`."""

from sok_like.optimizers.lazy_adam import Adam as Adam
