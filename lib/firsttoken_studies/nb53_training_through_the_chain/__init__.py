"""53 · Training through the chain."""
