"""Number of pipelines of a service: their load, the wanted number, and which pipeline leaves."""
