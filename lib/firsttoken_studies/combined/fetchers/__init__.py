"""Processes that each fetch a part of the layers, serve as a pipeline, and give way to the first of them."""
