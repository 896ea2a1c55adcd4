"""`sok.tf.keras.optimizers.adam.Adam`."""

from sok_like.optimizers.own import Adam as Adam
