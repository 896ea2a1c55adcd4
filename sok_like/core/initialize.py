"""`sok_like.core.initialize.Init`, SOK's path of `sok.Init`."""

from sok_like.lookup import by_key as by_key  # makes its tables readable by key
from sok_like.runtime.ranks.initialize import Init as Init
