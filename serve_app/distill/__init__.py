"""Makes and keeps exit heads: features, training, calibration, evaluation, choice, refreshing."""
