"""The command ``lightning-hybrid hardware``: presets of hardware, and a description of this machine by measurement."""
