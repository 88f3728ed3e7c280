"""A paged serving engine for unmodified Hugging Face decoders: schedulers, preemption, swap; live or on a cost model.

``engine.Engine`` steps; a scheduler says what runs, a preemption policy how a victim comes back, an executor does it.
"""
