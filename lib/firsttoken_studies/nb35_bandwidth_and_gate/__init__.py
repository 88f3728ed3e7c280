"""35 · A group for this link, and a gate before the answer."""
