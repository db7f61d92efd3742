"""The version of the package, which its metadata, command line and messages state."""

__version__ = "0.1.0"
