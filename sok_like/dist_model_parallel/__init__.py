"""Keras embeddings sharded over ranks, under the names of DMP.

    import sok_like.dist_model_parallel as dmp

Importing this loads no TensorFlow: a name is loaded when first used.
"""

from sok_like.runtime.framework import lazy_modules

__all__, __getattr__, __dir__ = lazy_modules.names(__name__)
