"""Pipelines and nodes that follow a load; `make test-autoscaling`."""
