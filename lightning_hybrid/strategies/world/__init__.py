"""What ranks know of each other; evaluation, samplers and stops over replicas."""
