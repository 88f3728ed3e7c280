"""50 · A swarm that survives its members."""
