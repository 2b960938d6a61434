"""The router: an actor of the control plane, and the calls of it."""
