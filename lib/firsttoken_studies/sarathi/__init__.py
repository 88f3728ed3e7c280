"""What notebooks 40 to 45 show."""
