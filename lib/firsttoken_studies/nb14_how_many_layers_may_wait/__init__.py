"""14 · How many layers may wait: TTFT against quality."""
