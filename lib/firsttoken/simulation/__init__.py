"""What a simulated engine stands for: the hardware that a step would run on, and the loads that it would serve."""
