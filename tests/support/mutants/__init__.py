"""Mechanisms made wrong in a plausible way, each of which must turn its notebook red: one module a report."""

REPORTS = ("sarathi", "cps", "progressiveserve", "droidspeak", "petals")
