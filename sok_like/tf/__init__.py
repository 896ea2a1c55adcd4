"""Holds `keras`, at the path of SOK 1.x's optimizers."""

from sok_like.tf import keras as keras
