"""`eesd bench autoscaling`: pipelines and nodes that follow a load."""
