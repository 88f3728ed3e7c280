"""Servers of a swarm all foresee the same few moves, and only those that have to move go."""
