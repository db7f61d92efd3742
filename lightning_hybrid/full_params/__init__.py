"""User code outside of layers reads full parameters and gradients, though each rank holds a part of them."""
