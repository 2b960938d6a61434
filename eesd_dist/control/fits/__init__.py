"""Fits of the calibration: a logistic regression and a monotone curve."""
