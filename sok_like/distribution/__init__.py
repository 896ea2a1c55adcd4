"""Keras' distributions on the TensorFlow backend, with variables that are actually sharded.

    from sok_like.distribution import DeviceMesh, LayoutMap, ModelParallel, set_distribution

Importing this loads no TensorFlow: a name is loaded when first used.
"""

from sok_like.runtime.framework import lazy_modules

__all__, __getattr__, __dir__ = lazy_modules.names(__name__)
