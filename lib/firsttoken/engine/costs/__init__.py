"""What a step, a swap and a recompute cost: as the paper published it, as fitted here, and as it changes in mid-run."""
