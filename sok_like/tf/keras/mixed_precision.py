"""`sok.tf.keras.mixed_precision.LossScaleOptimizer`."""

from sok_like.optimizers.sok1_loss_scale import LossScaleOptimizer as LossScaleOptimizer
