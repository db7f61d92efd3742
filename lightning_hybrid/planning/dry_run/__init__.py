"""Dry runs: what any rank of any world would hold and send, in one process without the other ranks."""
