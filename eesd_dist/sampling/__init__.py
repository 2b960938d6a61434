"""Sampling: how a token is chosen from logits, by the coupled rule or by rejection sampling."""
