"""Servers answer for what they compute: commitments, audits, and a judge."""
