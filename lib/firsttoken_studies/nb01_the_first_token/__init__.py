"""01 · The first token."""
