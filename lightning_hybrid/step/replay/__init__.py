"""Run one stage of a recorded step."""
