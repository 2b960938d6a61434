"""Decides what the exit head learns from its target."""
