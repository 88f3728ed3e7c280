"""Modules, their classes that READMEs named, and members that policies use, under the names that they had before.

The old names work for this version, and one line names the new one.
"""

import importlib
import sys
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

_BORROWING, _COMBINED = "firsttoken_extras.layer_borrowing", "firsttoken_studies.combined"
_PLANES, _STAGED = "firsttoken_extras.bitplanes", "firsttoken.progressiveserve.staged_serving"
RENAMED = {  # the longest that a name begins with counts
    "firsttoken.chunked": "firsttoken.sarathi",
    "firsttoken.crosspoint": "firsttoken.cps",
    "firsttoken.crosspoint.on_vllm": "firsttoken_extras.vllm_cross_point",
    "firsttoken.droidspeak.prefix_finder": "firsttoken.droidspeak.source",
    "firsttoken.engine.apart": "firsttoken_extras.worker",
    "firsttoken.engine.apart.config": "firsttoken_extras.worker.worker_config",
    "firsttoken.engine.apart.executor": "firsttoken_extras.worker.remote_executor",
    "firsttoken.engine.config": "firsttoken.engine.engine",
    "firsttoken.engine.edges": "firsttoken.engine.hidden_state_cache",
    "firsttoken.engine.engine_config": "firsttoken.engine.engine",
    "firsttoken.engine.live": "firsttoken.engine.live_executor",
    "firsttoken.engine.preemption.recompute": "firsttoken.engine.preemption",
    "firsttoken.engine.preemption.swap": "firsttoken.engine.preemption",
    "firsttoken.engine.preemptor": "firsttoken.engine.preemption.preemption_policy",
    "firsttoken.engine.scheduler_config": "firsttoken.engine.schedulers.scheduler",
    "firsttoken.engine.schedulers.ablation": "firsttoken.engine.schedulers.sarathi",
    "firsttoken.engine.schedulers.adaptive_budget": "firsttoken.engine.schedulers.sarathi",
    "firsttoken.engine.schedulers.base": "firsttoken.engine.schedulers.scheduler",
    "firsttoken.engine.schedulers.deadline": "firsttoken.engine.schedulers.sarathi",
    "firsttoken.engine.schedulers.iteration_level": "firsttoken.engine.schedulers.sarathi",
    "firsttoken.engine.schedulers.prefill_cap": "firsttoken.engine.schedulers.sarathi",
    "firsttoken.engine.schedulers.prefill_first": "firsttoken.engine.schedulers.sarathi",
    "firsttoken.engine.schedulers.request_level": "firsttoken.engine.schedulers.sarathi",
    "firsttoken.engine.schedulers.shortest_first": "firsttoken.engine.schedulers.sarathi",
    "firsttoken.engine.segments": "firsttoken.engine.decoder",
    "firsttoken.engine.views": "firsttoken.engine.model_version",
    "firsttoken.engine.worker": "firsttoken_extras.worker",
    "firsttoken.experiments": "firsttoken_studies.experiments",
    "firsttoken.kvreuse": "firsttoken.droidspeak",
    "firsttoken.ledger": "firsttoken_studies.ledger",
    "firsttoken.progressive": "firsttoken.progressiveserve",
    "firsttoken.progressive.planes": _PLANES,
    "firsttoken.progressive.recovery": "firsttoken.progressiveserve.staged_serving",
    "firsttoken.progressiveserve.bitplanes": _PLANES,
    "firsttoken.progressiveserve.bitplanes.entries": f"{_PLANES}.plane_format",
    "firsttoken.petals.cover": "firsttoken.petals.routing",
    "firsttoken.petals.ending": "firsttoken.petals.fairness",
    "firsttoken.petals.int8_checkpoint": "firsttoken.petals.checkpoint_blocks",
    "firsttoken.petals.limits": "firsttoken.petals.session",
    "firsttoken.petals.messages": "firsttoken.petals.contacts",
    "firsttoken.petals.min_move_rebalancing": "firsttoken_extras.min_move_rebalancing.rule",
    "firsttoken.petals.registry": "firsttoken.petals.records",
    "firsttoken.petals.service": "firsttoken.petals.server",
    "firsttoken.petals.shares": "firsttoken.petals.fairness",
    "firsttoken.petals.trust.evidence": "firsttoken.petals.trust.commitments",
    "firsttoken.service.over_worker": "firsttoken_extras.worker.worker_server",
    f"{_STAGED}.request_limits": "firsttoken.engine.request_limits",
    f"{_STAGED}.stage_loader": f"{_STAGED}.staged_server",
    f"{_STAGED}.unstaged_model": "firsttoken.service.served_model",
    "firsttoken.service.prefixes": "firsttoken.service.served_model",
    "firsttoken.service.process": "firsttoken.service.launch",
    "firsttoken.service.static_server": "firsttoken.engine.model_server",
    "firsttoken.swarm": "firsttoken.petals",
    "firsttoken.swarm.remote": "firsttoken.petals.remote_model",
    "firsttoken.swarm.trust.places": "firsttoken.petals.trust.priority_queue",
    "firsttoken.swarm.trust.thanks": "firsttoken.petals.trust.receipts",
    "firsttoken.swarm.tuning.adapters": "firsttoken.petals.tuning.client_adapters",
    "firsttoken.swarm.tuning.remote": "firsttoken.petals.tuning.remote_training",
    "firsttoken.together": _COMBINED,
    "firsttoken.together.borrowed": _BORROWING,
    "firsttoken.together.borrowed.ends": f"{_BORROWING}.embeddings",
    "firsttoken.together.borrowed.loan": f"{_BORROWING}.lease",
    "firsttoken.together.fetchers.pipeline": f"{_COMBINED}.fetchers.trial",
}


def renamed(name: str) -> str | None:
    """What the module ``name`` is called now; None where that is its name."""
    parts = name.split(".")
    for end in range(len(parts), 1, -1):
        if (now := RENAMED.get(".".join(parts[:end]))) is not None:
            return ".".join([now, *parts[end:]])
    return None


class OldNames:
    """Finds and loads a module by its old name: it is the same module, and a line on stderr names the new one.

    It names no base class of ``importlib.abc``, whose import takes 12 ms of each start.
    """

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """The spec of a module that is called otherwise now, and None for all others."""
        now = renamed(fullname) if fullname.startswith("firsttoken.") else None
        return None if now is None else ModuleSpec(fullname, self, origin=now)

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        """The module under its new name. Raises ModuleNotFoundError where there is none."""
        module = importlib.import_module(str(spec.origin))
        spec.loader_state = module.__spec__
        print(f"firsttoken: the module {spec.name} is called {spec.origin} now", file=sys.stderr)
        return module

    def exec_module(self, module: ModuleType) -> None:
        """Nothing runs again; the module keeps the spec of its new name, which the import system has replaced."""
        module.__spec__ = module.__spec__.loader_state


def install() -> None:
    """Let old names be found. It goes first, as a module that moved within its package has both names there."""
    sys.meta_path.insert(0, OldNames())


class OldMember:
    """An attribute of a class that its users may still call by the name that it had before.

    The old name works for this version, and one line on stderr names the new one.
    """

    def __init__(self, now: str) -> None:
        self._now, self._told = now, False

    def __set_name__(self, owner: type, name: str) -> None:
        self._line = f"firsttoken: {owner.__name__}.{name} is called {owner.__name__}.{self._now} now"

    def __get__(self, instance: object, owner: type) -> Any:
        if not self._told:
            print(self._line, file=sys.stderr)
            self._told = True
        return getattr(owner if instance is None else instance, self._now)


def classes(module: str, **now: str) -> Callable[[str], Any]:
    """The ``__getattr__`` of ``module`` that finds its classes by the names that they had before.

    ``now`` gives by old name the new one, which one line on stderr tells.
    """

    def found(name: str) -> Any:
        if name not in now:
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        print(f"firsttoken: {module}.{name} is called {module}.{now[name]} now", file=sys.stderr)
        return getattr(sys.modules[module], now[name])

    return found
