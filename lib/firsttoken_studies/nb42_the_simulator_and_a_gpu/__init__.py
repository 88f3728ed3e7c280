"""42 · How far the simulator is from a real GPU."""
