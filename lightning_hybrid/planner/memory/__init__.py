"""Bytes that each pipeline rank of a layout holds at the peak of a step, before any of it runs."""
