"""ASGI middleware around the whole API."""
