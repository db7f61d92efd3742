"""Step runners: with pipeline stages, with data shares, and unpartitioned."""
