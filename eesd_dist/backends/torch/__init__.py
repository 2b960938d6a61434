"""The readable reference: torch's operations, on any device. Other backends start from it."""
