"""Starts and stops a service, and operates a running one: connection, promotion of a head."""
