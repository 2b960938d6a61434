"""Sources of texts and of the target's rows: an engine here, or a running service."""
