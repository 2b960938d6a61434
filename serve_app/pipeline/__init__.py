"""The pipeline deployment: its workers, their placement and recovery, its live streams."""
