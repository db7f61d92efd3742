"""Searches of wide layers on narrow copies, and the check that both run the same program."""
