"""The surroundings of a simulated engine: the hardware that a step would run on, and the loads that it would serve."""
