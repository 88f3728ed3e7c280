"""The costs of a step, a swap and a recompute: the interface of every cost model, and one fitted here."""
