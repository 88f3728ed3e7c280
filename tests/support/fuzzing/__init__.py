"""Damage to files of every format, and what may come of it: the project's error, or the same as without it."""
