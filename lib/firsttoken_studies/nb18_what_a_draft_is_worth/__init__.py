"""18 · What a draft is worth."""
