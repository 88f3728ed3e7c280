"""Answers of a start that waits for no import of torch; an engine goes on with them."""
