"""Notebook 05: DroidSpeak in one page."""
