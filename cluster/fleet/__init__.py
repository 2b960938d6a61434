"""Simulation of a fleet of pipelines under a load, with the policy that a service runs."""
