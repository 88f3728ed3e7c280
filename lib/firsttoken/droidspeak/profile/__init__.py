"""Which layers to recompute: sensitivity of single layers, quality of contiguous groups, the Pareto frontier."""
