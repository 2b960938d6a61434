"""A round's parts on a CPU in one compiled call each: drafting a chain, and its verification."""
