"""43 · What a batch costs: tokens, decodes and pieces."""
