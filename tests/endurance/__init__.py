"""A service under load and faults for many minutes, and what grows; `make test-endurance`."""
