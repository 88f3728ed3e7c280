"""Real weights, questions and text, pinned by hash and named by a short string."""
