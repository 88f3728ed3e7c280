"""Loads weights into memory: in the order of the forward pass, in parallel, while it already computes."""
