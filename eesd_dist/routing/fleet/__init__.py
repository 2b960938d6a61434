"""How many pipelines a service has: their load, the wanted number, and which pipeline leaves."""
