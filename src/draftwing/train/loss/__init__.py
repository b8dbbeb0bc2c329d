"""What an update minimises."""
