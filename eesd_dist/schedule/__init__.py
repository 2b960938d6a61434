"""Decides who runs in a round and which pages they hold, without a tensor."""
