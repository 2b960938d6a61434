"""Decides every token, by one rule that drafting and verifying share."""
