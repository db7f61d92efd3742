"""Execution of pipeline programs: forwards, backwards, sends and receives."""
