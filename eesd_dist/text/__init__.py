"""Turns text into token ids and back; ids inside, text at the rim."""
