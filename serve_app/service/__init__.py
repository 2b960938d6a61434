"""Starts, operates and stops a service: its local Ray, its connection file, an exit head for it."""
