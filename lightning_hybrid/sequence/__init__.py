"""Sequences sharded over ranks: exchanges of positions for heads, and ring attention."""
