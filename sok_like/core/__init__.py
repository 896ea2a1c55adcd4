"""Holds `initialize` and `context_scope`, at the paths SOK 1.x published them."""
