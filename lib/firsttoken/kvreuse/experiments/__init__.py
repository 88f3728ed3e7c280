"""What is measured, and what notebooks 30 to 35 draw of it."""
