"""The service people meet: command line, HTTP, Ray Serve deployments."""
