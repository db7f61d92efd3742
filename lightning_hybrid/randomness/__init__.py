"""Random numbers that do not depend on the layout, and snapshots of generators."""
