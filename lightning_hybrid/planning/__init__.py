"""Plans of runs: what every rank would hold and send, and which layout to choose, without training."""
