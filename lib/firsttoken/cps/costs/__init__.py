"""CPS: what a swap and a recompute cost by the length of a request, and where the two cross."""
