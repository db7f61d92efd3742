"""Parameters that are built on the meta device, and their values."""
