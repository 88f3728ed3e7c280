"""47 · The other reports on GPUs that are not here."""
