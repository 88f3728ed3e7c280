"""What only the systems together can do, measured on the one engine."""
