"""Computes spans of layers, and holds their weights and KV pages."""
