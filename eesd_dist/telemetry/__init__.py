"""Turns returned statistics into metrics and spans; decides nothing for the engine."""
