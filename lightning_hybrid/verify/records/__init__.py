"""Run records, and their comparison between processes."""
