"""Holds `initialize` and `context_scope`, at SOK 1.x's published paths."""

from sok_like.core import context_scope as context_scope
from sok_like.core import initialize as initialize
