"""Run a step once on stand-ins, and record it as a graph."""
