"""`eesd bench endure`: a service under load and faults for many minutes, and what grows."""
