"""16 · The open session: when layers appear in the middle of an answer."""
