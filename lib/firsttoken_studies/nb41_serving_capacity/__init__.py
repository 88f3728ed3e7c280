"""41 · Serving capacity: how many requests a second within an objective."""
