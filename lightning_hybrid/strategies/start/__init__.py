"""From setup to the first batch."""
