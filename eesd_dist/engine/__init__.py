"""The engine: runs rounds of drafting and verifying."""
