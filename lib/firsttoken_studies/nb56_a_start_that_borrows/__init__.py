"""56 · A start that borrows."""
