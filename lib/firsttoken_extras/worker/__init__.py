"""Engine and worker apart: scheduler, blocks and requests in this process, weights, KV pool and steps in another."""
