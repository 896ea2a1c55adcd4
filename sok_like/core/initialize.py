"""`sok_like.core.initialize.Init`, SOK's own path of `sok.Init`."""

from sok_like.lookup import by_key as by_key  # so that its tables can be looked up by key
from sok_like.runtime.initialize import Init as Init
