"""Run a program: forwards, backwards, sends and receives."""
