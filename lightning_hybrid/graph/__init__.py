"""The step graph as plain data, and its partition into pipeline stages."""
