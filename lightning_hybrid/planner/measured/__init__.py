"""Predictions corrected by the measured steps of a run of the same model."""
