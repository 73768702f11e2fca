"""Benchmarks: one question a file, run as `python -m bench.NAME` from the repository's root."""
