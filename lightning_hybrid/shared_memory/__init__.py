"""What ranks of one host tell each other without a network: on CPUs, where gloo knows sockets of the network only."""
