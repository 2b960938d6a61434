"""Predicts memory and speed of a deployment before there is one."""
