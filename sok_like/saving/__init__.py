"""Saving: what of a program is saved, how ranks agree on it, and the files that it goes to.

May import `runtime` and `table`. The lookup and the front doors stand above it.
"""
