"""Run layers that are cut over tensor ranks."""
