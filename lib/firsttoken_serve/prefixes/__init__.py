"""What `firsttoken prefix` does, and the stored prefixes that a service takes."""
