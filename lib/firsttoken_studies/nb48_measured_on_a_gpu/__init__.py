"""48 · Measured on a GPU."""
