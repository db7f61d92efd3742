"""What steps log, over replicas."""
