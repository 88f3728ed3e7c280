"""51 · Eight bits: what they save, what they cost."""
