"""The commands of `eesd`."""
