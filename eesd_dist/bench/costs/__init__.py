"""Measures what the stages of an engine cost: the input of `eesd plan --costs`."""
