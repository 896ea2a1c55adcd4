"""Holds the module `Saver`, at SOK 1.x's published path."""

from sok_like.saver import Saver as Saver
