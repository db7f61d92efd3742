"""The proof that a plan is right: trials with threads as ranks, their inputs, and narrow copies of wide layers."""
