"""Trains one exit head: what is asked, batches, losses, steps, checkpoints, and DeepSpeed."""
