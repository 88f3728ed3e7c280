"""What notebooks 40 to 42 show."""
