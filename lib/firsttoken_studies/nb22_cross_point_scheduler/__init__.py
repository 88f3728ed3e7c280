"""22 · The cross-point scheduler: where its gain comes from."""
