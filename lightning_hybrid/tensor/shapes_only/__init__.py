"""Sharded units at full width without values: the messages and saved bytes of one rank."""
