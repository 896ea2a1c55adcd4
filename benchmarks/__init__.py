"""Benchmarks of sok_like against the alternatives of today; `python -m benchmarks --help`."""
