"""Draws cases: worlds, engines, requests and troubles."""
