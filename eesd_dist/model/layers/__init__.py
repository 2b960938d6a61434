"""Decoder layers: weights, a pass with pages, and the norm and LM head after them."""
