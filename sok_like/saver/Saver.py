"""`sok_like.saver.Saver.Saver`, SOK's path of `sok.Saver`."""

from sok_like.saving.saver import Saver as Saver
