"""Checks nodes, and measures the links between them, before a service starts on them."""
