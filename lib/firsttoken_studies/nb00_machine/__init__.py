"""00 · What this machine can do at most."""
