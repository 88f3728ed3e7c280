"""45 · Beside vLLM: the same tokens a step, the same requests."""
