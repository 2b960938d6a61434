"""Exit heads: their files, the parameters that are trained, and a head ready to draft."""
