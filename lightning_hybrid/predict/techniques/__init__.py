"""The techniques that a plan chooses among: an interface, one file for each, and their order."""
