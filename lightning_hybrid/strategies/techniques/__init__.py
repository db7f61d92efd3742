"""Set-up of each parallelism technique in a run."""
