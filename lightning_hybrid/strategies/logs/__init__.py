"""Logging of steps, reduced over replicas."""
