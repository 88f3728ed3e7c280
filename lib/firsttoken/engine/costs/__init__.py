"""What a step, a swap and a recompute cost: what every cost model gives, and one fitted here."""
