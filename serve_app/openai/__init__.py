"""Decides how the OpenAI API is spoken: fields, errors, streams."""
