"""The Ray instance of a service on this machine: environment, start and end, address."""
