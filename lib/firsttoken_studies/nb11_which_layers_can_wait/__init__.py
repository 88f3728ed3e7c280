"""11 · Which layers can wait."""
