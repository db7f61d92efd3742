"""What a run prints at its start: layout, batch, parameters, memory per rank and environment."""
