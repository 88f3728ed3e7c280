"""Schedulers: one policy a file, one method each; the registry is what a configuration names."""

from firsttoken.engine.schedulers.base import Scheduler
from firsttoken.engine.schedulers.iteration_level import IterationLevel
from firsttoken.engine.schedulers.prefill_first import PrefillFirst
from firsttoken.engine.schedulers.request_level import RequestLevel

SCHEDULERS: dict[str, type[Scheduler]] = {kind.name: kind for kind in (RequestLevel, IterationLevel, PrefillFirst)}
