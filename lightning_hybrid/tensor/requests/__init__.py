"""What the user and the model ask for, and which of them wins."""
