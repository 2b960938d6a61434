"""Trains one exit head: requests, batches, losses, steps, checkpoints, and DeepSpeed."""
