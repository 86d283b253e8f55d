"""Benchmarks of omni_async; see `python -m bench.engine --help`."""
