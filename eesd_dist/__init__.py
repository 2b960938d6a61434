"""Early-exit speculative decoding, split over stages: the engine and everything under it."""
