"""Schedules with split backwards beyond ZB-H1: two in the V placement, and a search under a memory limit."""
