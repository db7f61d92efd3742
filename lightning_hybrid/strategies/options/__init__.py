"""Options of the strategy."""
