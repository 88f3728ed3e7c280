"""Notebook 06: PETALS in one page."""
