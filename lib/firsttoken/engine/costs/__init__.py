"""What a step, a swap and a recompute cost: as the paper published it, as profiled on a GPU, and as fitted here."""
