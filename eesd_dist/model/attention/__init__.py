"""Attention: over keys and values in pages, one call for all rows of a layer, and over whole
sequences."""
