"""A link between a folder and a process that reads it: real, or shaped to a rate."""
