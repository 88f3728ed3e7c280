"""21 · Swap or recompute: what the cross-point is made of."""
