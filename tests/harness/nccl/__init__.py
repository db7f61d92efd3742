"""Readiness for NCCL, proved on CPUs: each rank's use of the device is recorded once, and judged by many rules."""
