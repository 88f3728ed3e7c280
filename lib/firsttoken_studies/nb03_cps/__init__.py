"""Notebook 03: CPS in one page."""
