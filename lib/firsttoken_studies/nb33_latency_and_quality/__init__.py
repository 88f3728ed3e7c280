"""33 · Latency and quality: every way to come by a cache."""
