"""How the layers of a model are cut over tensor ranks, as plain data."""
