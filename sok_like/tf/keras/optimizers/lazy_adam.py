"""`sok.tf.keras.optimizers.lazy_adam.LazyAdamOptimizer`."""

from sok_like.optimizers.own import LazyAdamOptimizer as LazyAdamOptimizer
