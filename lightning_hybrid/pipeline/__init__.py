"""Run a schedule: stages, the messages between them, and the parameters they share."""
