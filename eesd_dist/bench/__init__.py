"""Benchmarks; every report has the settings it was measured with."""
