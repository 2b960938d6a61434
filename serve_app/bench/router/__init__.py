"""`eesd bench router`: what planning by the router costs."""
