"""The workload of an engine: prompts and answers of known lengths, and the arrival of each request."""
