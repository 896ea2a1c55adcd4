"""`sok.tf.keras.optimizers.adam.Adam`."""

from sok_like.optimizers.keras_adam import Adam as Adam
