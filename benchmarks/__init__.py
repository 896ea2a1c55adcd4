"""Benchmarks of sok_like against what users have today; `python -m benchmarks --help`."""
