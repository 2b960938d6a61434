"""What only a GPU can prove, checked on one in a few minutes: `infra/gpu/check.sh`."""
