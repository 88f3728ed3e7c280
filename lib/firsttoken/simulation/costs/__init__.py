"""What a step, a swap and a recompute cost: as the paper published it, and as profiled on a GPU."""
