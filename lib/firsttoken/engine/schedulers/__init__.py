"""Schedulers: ``scheduler.py`` has what policies are made of, ``sarathi.py`` those that a configuration names."""

from firsttoken.engine.schedulers.sarathi import REPORTED, SCHEDULERS, scheduler_named

__all__ = ["REPORTED", "SCHEDULERS", "scheduler_named"]
