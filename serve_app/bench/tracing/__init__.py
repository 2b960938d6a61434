"""`eesd bench tracing`: what traces cost a running service."""
