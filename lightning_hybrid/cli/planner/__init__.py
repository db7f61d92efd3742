"""Commands of the planner."""
