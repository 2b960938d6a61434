"""Decides what happens in a round, and in which order."""
