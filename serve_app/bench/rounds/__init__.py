"""`eesd bench rounds`: where the time of a round goes, over real actors."""
