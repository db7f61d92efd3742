"""Small messages by which ranks agree."""
