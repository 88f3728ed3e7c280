"""31 · One contiguous group: why, which, and what finding it costs."""
