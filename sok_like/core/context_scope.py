"""`sok_like.core.context_scope.OptimizerScope`, SOK's path of `sok.OptimizerScope`."""

from sok_like.optimizers.wrapper import OptimizerScope as OptimizerScope
