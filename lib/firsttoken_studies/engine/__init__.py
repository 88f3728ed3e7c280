"""The engine's experiments, and how their results are drawn and tabled."""
