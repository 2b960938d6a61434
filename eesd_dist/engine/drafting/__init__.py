"""The draft stage: rows of layers [0, N), the exit head's guesses, and what to draft of them."""
