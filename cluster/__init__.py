"""Checks whether machines are suitable for the service, and predicts the speed-up on them."""
