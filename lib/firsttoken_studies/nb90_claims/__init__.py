"""90 · What holds."""
