"""What only the systems together can do, on the one engine."""
