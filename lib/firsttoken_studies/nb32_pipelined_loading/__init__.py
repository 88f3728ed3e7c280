"""32 · E first, KV meanwhile: what the pipeline hides."""
