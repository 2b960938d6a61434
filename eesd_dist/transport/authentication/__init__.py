"""Connections between ranks: the proof of an epoch's secret, the store, and what is refused."""
