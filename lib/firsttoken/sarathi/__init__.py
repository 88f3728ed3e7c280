"""Sarathi-Serve: what chunked prefills and stall-free batches buy, on one machine or on a simulated GPU."""
