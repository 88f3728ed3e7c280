"""A scheduler as a profile or a reader names it: of the engine, "sarathi 512", or of one's own file, "mine.py 512"."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path

from firsttoken.engine.engine import EngineConfig
from firsttoken.engine.schedulers.scheduler import Scheduler
from firsttoken.sarathi.capacity import Objective
from firsttoken.sarathi.checked_scheduler import watched
from firsttoken.study.errors import ProfileError
from firsttoken.study.policy_file import PolicyFile, PolicyKind

TTFT_S = 2.0  # of schedulers that have an objective for it: the delay that the paper allows
SCHEDULER = PolicyKind(
    "scheduler", Scheduler, "write a subclass of firsttoken.engine.schedulers.scheduler.Scheduler with one"
)


def scheduler_labels(text: str) -> dict[str, str | int]:
    """Return the labels in a summary of the scheduler ``text``: {"scheduler": "sarathi", "budget_tokens": 512}, without
    the budget where it names none."""
    name, _, last = text.rpartition(" ")
    return {"scheduler": name, "budget_tokens": int(last)} if name and last.isdigit() else {"scheduler": text}


@dataclass(frozen=True)
class Policy:
    """The policy that ``text`` names; ``kind`` is a name of the registry, or a class of ``file``, which is watched."""

    text: str
    kind: str | type[Scheduler]
    budget: int | None
    file: PolicyFile | None = None

    @classmethod
    def named(cls, text: str) -> Policy:
        """Read the policy of ``text``. Raises ProfileError for a budget that is no number, or a file without one."""
        labels = scheduler_labels(text)
        name, budget = labels["scheduler"], labels.get("budget_tokens")
        if name.endswith(".py"):
            brought = PolicyFile.read(Path(name), SCHEDULER)
            return cls(text, watched(brought.policy, brought.file, brought.decisions), budget, brought)
        if " " in name:
            raise ProfileError(f"scheduler {text!r}: write the name and, where it has one, the token budget")
        return cls(text, name, budget)

    def config(self, objective: Objective, requests: int) -> EngineConfig:
        """The engine's configuration for ``objective`` and at most ``requests`` at once; vLLM's watermark.

        Raises ProfileError for an unknown scheduler, and for a budget that it cannot keep.
        """
        chosen = {} if self.budget is None else {"token_budget": self.budget}
        return EngineConfig(scheduler=self.kind, requests=requests, tbt_s=objective.tbt_s, ttft_s=TTFT_S, **chosen)

    def judged(self) -> AbstractContextManager[None]:
        """A context around a run of the policy. It raises ProfileError, one line that names the file, when a file of
        one's own breaks a rule or never ends."""
        return nullcontext() if self.file is None else self.file.judged()
