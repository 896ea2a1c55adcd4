# The public names; `runtime/framework/lazy_modules.py` reads them from here.
from sok_like.deeprec.names import CacheStrategy as CacheStrategy
from sok_like.deeprec.names import CollectiveStrategy as CollectiveStrategy
from sok_like.deeprec.names import StorageType as StorageType
from sok_like.deeprec.names import install as install
from sok_like.deeprec.names import uninstall as uninstall

__all__: list[str]
