"""Draft lengths of a whole batch at once, by expected tokens per second."""
