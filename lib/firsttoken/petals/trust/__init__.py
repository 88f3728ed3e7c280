"""Servers answer for what they compute: commitments, audits, a judge, accounts of points, a queue that spends them."""
