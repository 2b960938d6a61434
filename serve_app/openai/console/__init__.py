"""The web pages: the console at `/console`, and the description of the API at `/docs`."""
