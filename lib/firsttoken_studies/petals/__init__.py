"""What notebooks 51 and 52 show."""
