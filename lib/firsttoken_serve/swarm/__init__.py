"""What `firsttoken swarm` does, and a service whose layers a swarm computes."""
