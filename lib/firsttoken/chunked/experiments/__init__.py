"""What notebooks 40 to 44 show."""
