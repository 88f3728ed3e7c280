"""13 · Cold start: the first token before the model is whole."""
