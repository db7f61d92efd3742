"""Find a plan."""
