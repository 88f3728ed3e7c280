"""30 · Full reuse of another model's cache, and which layers mind."""
