"""15 · Recovery: serving while the model grows."""
