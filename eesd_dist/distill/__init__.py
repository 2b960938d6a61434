"""Distillation: trains, calibrates and evaluates exit heads of a target."""
