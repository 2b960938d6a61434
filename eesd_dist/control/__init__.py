"""Draft-length control: decides how long to draft, from counts and evidence, never tensors."""
