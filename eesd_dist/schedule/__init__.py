"""Scheduling: which requests run in a round and which KV pages they hold. Uses no tensors."""
