"""Decides how ranks talk: every wait has a deadline, and its error names the peer."""
