"""Holds `Saver`, the module, at the path SOK 1.x published it."""
