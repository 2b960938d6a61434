"""The compiled forward pass on a CPU: one call for a span's layers, one for a head's logits."""
