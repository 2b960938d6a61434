"""Checks that need a GPU, run on one GPU in a few minutes: `infra/gpu/check.sh`."""
