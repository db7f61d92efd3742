"""Small messages between ranks, by which they check that they agree; broadcasts."""
