"""DeepRec's names: `install()` puts them into TensorFlow, `CollectiveStrategy` is its strategy."""

from sok_like.deeprec.collective_strategy import CollectiveStrategy as CollectiveStrategy
from sok_like.deeprec.names import CacheStrategy as CacheStrategy
from sok_like.deeprec.names import StorageType as StorageType
from sok_like.deeprec.names import install as install
from sok_like.deeprec.names import uninstall as uninstall

__all__ = ["CacheStrategy", "CollectiveStrategy", "StorageType", "install", "uninstall"]


def __dir__() -> list[str]:
    return __all__
