"""Holds `initialize`, at the path SOK 1.x published it."""
