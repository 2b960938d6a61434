"""The parts of an epoch in a worker: joining it, its process groups, its loop."""
