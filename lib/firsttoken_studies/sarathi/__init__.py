"""Sarathi-Serve measured: stalls, capacity, batches, loads that change, beside vLLM."""
