"""Descriptions of devices and links: presets in TOML, measured curves, and times of collectives."""
