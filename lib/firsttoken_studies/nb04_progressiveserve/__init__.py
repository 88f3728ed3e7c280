"""Notebook 04: ProgressiveServe in one page."""
