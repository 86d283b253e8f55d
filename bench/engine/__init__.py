"""Benchmarks of the whole engine and of its host side."""
