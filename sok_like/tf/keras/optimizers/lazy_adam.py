"""`sok.tf.keras.optimizers.lazy_adam.LazyAdamOptimizer`."""

from sok_like.optimizers.lazy_adam import LazyAdamOptimizer as LazyAdamOptimizer
