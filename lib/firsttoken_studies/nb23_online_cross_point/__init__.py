"""23 · A threshold that learns."""
