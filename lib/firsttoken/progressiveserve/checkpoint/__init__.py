"""Staged checkpoints: the files of a model in the order in which a progressive start needs them."""
