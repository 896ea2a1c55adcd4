"""Benchmarks of sok_like beside what users have today; `python -m benchmarks --help`."""
