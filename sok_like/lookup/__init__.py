"""Lookups over ranks, of hash tables and of dense tables: route, exchange, gather, combine.

May import `table`, `runtime` and `planner`. The front doors build on it.
"""
