"""Ranks: process groups, failures and stops; evaluation and samplers over replicas."""
