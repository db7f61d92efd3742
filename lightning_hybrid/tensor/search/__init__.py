"""The search for tensor plans of units and models."""
