"""Sharded units without values: plans searched by shapes alone, and the messages and saved bytes of one rank."""
