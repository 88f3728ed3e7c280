"""Notebook 02: Sarathi-Serve in one page."""
