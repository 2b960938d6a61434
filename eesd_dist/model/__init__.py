"""Decides what a span of layers computes, and where its weights and KV pages lie."""
