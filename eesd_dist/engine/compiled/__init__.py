"""A round's parts on a CPU in one compiled call each: its drafts, and their verification."""
