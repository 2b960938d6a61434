"""Which process runs where, and what happens when one dies; the only package that imports Ray."""
