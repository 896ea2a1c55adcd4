"""Holds `keras`, at the path SOK 1.x published its optimizers."""

from sok_like.tf import keras as keras
