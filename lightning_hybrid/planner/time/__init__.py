"""Seconds of one step of a layout: computation by layer, collectives, the pipeline's schedule, the optimizer."""
