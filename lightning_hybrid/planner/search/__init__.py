"""The search for a layout: candidates, their predictions, the ranking, and the reasons against the others."""
