"""35 · A group for this link."""
