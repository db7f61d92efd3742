"""What one step of a model costs: matrix products, bytes moved, bytes saved for the backward, parameters."""
