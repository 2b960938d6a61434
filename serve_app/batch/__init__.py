"""Runs a file of requests over an engine in this process or over a running service."""
