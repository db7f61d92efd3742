"""What a recorded step shows of linears, attention and vocabularies."""
