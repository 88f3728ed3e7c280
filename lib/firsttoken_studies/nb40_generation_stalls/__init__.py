"""40 · Generation stalls: who waits while a long prompt arrives."""
