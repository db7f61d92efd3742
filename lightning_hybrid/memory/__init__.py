"""What layers keep for their backward, and what they compute again."""
