"""SOK 1.x's optimizers: `Adam` and `LazyAdamOptimizer`."""

from sok_like.tf.keras.optimizers.adam import Adam as Adam
from sok_like.tf.keras.optimizers.lazy_adam import LazyAdamOptimizer as LazyAdamOptimizer
