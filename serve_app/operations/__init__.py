"""Brings a service up and down, and operates one that runs: connecting, promoting a head."""
