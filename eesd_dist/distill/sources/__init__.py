"""Where texts and the rows of the target come from: an engine here, or a running service."""
