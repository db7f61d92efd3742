"""Collectives of small messages, by which ranks check that they agree."""
