"""What is measured, and what notebooks 30 to 36 draw of it."""
