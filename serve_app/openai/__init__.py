"""The OpenAI API: fields, errors, streams."""
