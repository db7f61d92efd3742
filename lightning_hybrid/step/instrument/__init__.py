"""What is replaced in torch and in the user's modules while a step runs."""
