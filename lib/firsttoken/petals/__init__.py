"""PETALS: a swarm of layer servers that survives its members (arXiv 2209.01188)."""
