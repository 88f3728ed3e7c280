"""60 · One engine: what its parts cost each other."""
