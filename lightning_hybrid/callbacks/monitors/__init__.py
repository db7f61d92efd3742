"""Callbacks that measure a run and log what they find: throughput, memory, goodput."""
