"""63 · Many cold starts over one link, simulated."""
