"""34 · A profile on another task."""
