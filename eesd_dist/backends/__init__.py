"""Computation on each type of device: a package each, found by `eesd_dist.devices`."""
