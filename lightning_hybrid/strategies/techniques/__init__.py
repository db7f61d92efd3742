"""What each technique sets up in a run."""
