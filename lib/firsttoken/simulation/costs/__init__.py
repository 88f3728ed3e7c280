"""The costs of a step, a swap and a recompute: as the paper published them, and as profiled on a GPU."""
