"""Training through a chain: soft prompts, LoRA and heads are the client's, and servers stay frozen (PETALS, 2.2)."""
