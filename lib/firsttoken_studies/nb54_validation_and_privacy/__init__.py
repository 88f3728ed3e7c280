"""54 · Who answers for an answer, and who reads it."""
