"""Decides whether machines are fit for the service, and what it would gain on them."""
