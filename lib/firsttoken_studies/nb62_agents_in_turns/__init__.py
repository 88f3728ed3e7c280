"""62 · Agents in turns: one fine-tune reads what another has read."""
