"""Benchmarks that need a running service or real actors."""
