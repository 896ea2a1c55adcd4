"""DeepRec's names: `install()` puts them into TensorFlow, `CollectiveStrategy` is its strategy."""

from sok_like.runtime.framework import lazy_modules

__all__, __getattr__, __dir__ = lazy_modules.names(__name__)
