"""Which parameters of a layer are cut, how its ranks draw, and full contents for code outside."""
