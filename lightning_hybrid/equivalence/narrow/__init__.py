"""Narrow copies of wide modules, and the check that both run the same program."""
