"""Training data in the target's own words."""
