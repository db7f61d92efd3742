"""Owner ranks of parameters and units, and the recorded trace of each microbatch."""
