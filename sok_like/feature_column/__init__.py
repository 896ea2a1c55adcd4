"""Feature columns in groups; each group is looked up in one fused call.

    from sok_like import feature_column as fc

Names and arguments are those of `tf.feature_column` and of DeepRec's additions to it. Importing
this loads no TensorFlow: a name is loaded when first used.
"""

from sok_like.runtime.framework import lazy_modules

__all__, __getattr__, __dir__ = lazy_modules.names(__name__)
