"""`sok_like.core.initialize.Init`, SOK's own path of `sok.Init`."""

from sok_like.runtime.initialize import Init as Init
