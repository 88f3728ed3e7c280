"""61 · All five at once: a cold replica under load."""
