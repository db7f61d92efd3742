"""The step as plain data, and its cut into stages."""
