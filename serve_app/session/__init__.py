"""The local Ray instance of a service: environment, start and end, connection file."""
