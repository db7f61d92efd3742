"""Run a step once on stand-ins, and note what it does."""
