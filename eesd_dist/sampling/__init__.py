"""How a token is chosen from logits: the coupled rule, and rejection sampling beside it."""
