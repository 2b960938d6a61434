"""Prometheus pages of states that are not counted where they are shown."""
