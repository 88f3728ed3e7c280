"""Schedulers: one kind of policy a file, one method each; the registry is what a configuration names."""

from firsttoken.engine.schedulers.ablation import ChunkedOnly, HybridOnly
from firsttoken.engine.schedulers.iteration_level import IterationLevel
from firsttoken.engine.schedulers.prefill_first import PrefillFirst
from firsttoken.engine.schedulers.request_level import RequestLevel
from firsttoken.engine.schedulers.sarathi import AdaptiveBudget, Deadline, PrefillCap, Sarathi, ShortestFirst
from firsttoken.engine.schedulers.scheduler import Scheduler
from firsttoken.study.errors import ProfileError
from firsttoken.study.parsing.schema import unknown

_KINDS = (RequestLevel, IterationLevel, PrefillFirst, Sarathi, ChunkedOnly, HybridOnly)
_RIVALS = (PrefillCap, Deadline, AdaptiveBudget, ShortestFirst)
REPORTED: dict[str, type[Scheduler]] = {  # as the report's registry calls them (Sarathi-Serve, schedulers)
    "faster_transformer": RequestLevel,
    "orca": IterationLevel,
    "vllm": PrefillFirst,
    "simple_chunking": ChunkedOnly,
}

SCHEDULERS: dict[str, type[Scheduler]] = {kind.name: kind for kind in (*_KINDS, *_RIVALS)}


def scheduler_named(name: str | type[Scheduler]) -> type[Scheduler]:
    """The scheduler of this name, its own or the report's; a class of one's own is taken as it is.

    Raises ProfileError when there is none of the name.
    """
    if isinstance(name, type):
        return name
    if found := SCHEDULERS.get(name) or REPORTED.get(name):
        return found
    raise ProfileError(f"engine: no scheduler {name!r}; {unknown(name, [*SCHEDULERS, *REPORTED])}")
