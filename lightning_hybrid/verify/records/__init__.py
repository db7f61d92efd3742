"""Records of runs that can be compared between processes."""
