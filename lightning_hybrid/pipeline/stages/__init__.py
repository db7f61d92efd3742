"""Who holds what, and which recorded trace a microbatch takes."""
