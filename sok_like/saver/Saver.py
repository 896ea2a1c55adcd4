"""`sok_like.saver.Saver.Saver`, SOK's path of `sok.Saver`."""

from sok_like.table.saver import Saver as Saver
