"""Serving while the model is still growing: sessions, transitions between stages, and the engine."""
