"""36 · Throughput under load: what a shorter prefill is worth."""
