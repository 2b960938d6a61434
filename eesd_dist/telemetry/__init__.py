"""Metrics and spans, made from the statistics that the engine returns."""
