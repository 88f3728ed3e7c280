"""The cross-point found and followed while serving: what the paper leaves for future work (section 5)."""

from __future__ import annotations

from collections import deque
from dataclasses import replace

from firsttoken.cps.policies.curve import CostCurve
from firsttoken.engine.preemption.preemption_policy import Action, Observation, PreemptionPolicy
from firsttoken.study.errors import ProfileError

_RECENT = 64  # choices that say what is a small loss


class OnlineCrossPoint(PreemptionPolicy):
    """Chooses the way that two curves, learned from what the engine observes (``CostCurve``), predict to be cheaper.

    Prefills that overlap in time shared a step, and are learned as one prefill of all their tokens. An engine can tell
    of each only its share; by that, a short prompt beside long ones costs next to nothing, and a victim that comes back
    alone would be taken to. (On the paper's costs and workload, 6 seeds: 0.850 s of recoveries against 0.932 s.)

    The other way is taken, as an exploration, when all of this holds: it was neither seen nor explored in the last
    ``every`` choices (an ordinary prefill counts as seeing recompute); its expected loss is among the smallest quarter
    of the recent ones; and with it that of all explorations stays within ``explore`` of the predicted cost of all
    recoveries so far. The expected loss is what the curve's ``hope`` leaves of the predicted one: slowness that was
    seen once, or has just begun, is charged less and less the longer nobody looked, so that a stalled first copy or a
    link that was busy for a moment does not shut a way out. A cross-point among the lengths served needs no
    exploration, since both ways are in use. Where one way always wins, the other is looked at as often as the budget
    allows.

    A way that was never observed is tried once, outside of the budget. The observation may come late or never (a swap
    is priced when it comes back, and a full host pool turns it into a recompute): until then the way that is known
    serves, or up to ``start`` tokens (the paper's 1,024) swap while neither is, and the unknown way is tried again at
    choice 4, 16, 64 and so on. ``memory`` is that of the curves, in observations.
    """

    name = "online"

    def __init__(self, explore: float = 0.02, memory: float = 40, every: int = 10, start: float = 1024) -> None:
        if explore < 0 or memory <= 1 or every < 1 or start < 0:
            raise ProfileError(
                "online: explore and start must be 0 or more, memory above 1 and every at least 1, not "
                f"{explore}, {start}, {memory} and {every}"
            )
        self.explore = explore
        self.every = every
        self.start = start
        self.recovered_s = 0.0  # predicted cost of the cheaper way, summed over choices
        self.explored_s = 0.0  # expected loss, summed over explorations
        self.explorations = 0
        self._curves = {action: CostCurve(memory) for action in Action}
        self._choices = 0
        self._tries = dict.fromkeys(Action, 0)
        self._seen_at = dict.fromkeys(Action, 0)  # in choices
        self._explored_at = 0
        self._prefill: Observation | None = None  # of the step that may have had more
        self._losses: deque[float] = deque(maxlen=_RECENT)

    def predict(self, action: Action, tokens: int) -> float:
        """Seconds that ``action`` is expected to take; 0 while it was never observed."""
        return self._curves[action].predict(tokens)

    def choose(self, tokens: int, now_s: float) -> Action:
        self._learn_prefill()
        self._choices += 1
        unknown = [action for action in Action if not self._curves[action].seen]
        if unknown:
            return self._try(unknown, tokens)
        best, other = sorted(Action, key=lambda action: self.predict(action, tokens))
        cost = self.predict(best, tokens)
        self.recovered_s += cost
        charged = max(self._curves[other].hope(tokens, self._idle(other)) - cost, 0.0)
        self._losses.append(charged)
        if not self._is_due(other) or self.explored_s + charged > self.explore * self.recovered_s:
            return best
        self.explored_s += charged
        self.explorations += 1
        self._explored_at = self._choices
        return other

    def observe(self, seen: Observation) -> None:
        if seen.action is Action.SWAP:
            self._learn(seen)
            return
        before = self._prefill
        if before is not None and seen.now_s - before.now_s < seen.seconds:
            tokens, seconds = before.tokens + seen.tokens, before.seconds + seen.seconds
            seen = replace(seen, tokens=tokens, seconds=seconds)
        else:
            self._learn_prefill()
        self._prefill = seen

    def _learn_prefill(self) -> None:
        if self._prefill is not None:
            self._learn(self._prefill)
            self._prefill = None

    def _learn(self, seen: Observation) -> None:
        self._curves[seen.action].learn(seen.tokens, seen.seconds, old=self._idle(seen.action) >= self.every)
        self._seen_at[seen.action] = self._choices

    def _is_due(self, other: Action) -> bool:
        """Nobody looked for a while, and the last of the losses is small among the recent ones."""
        small = sum(loss < self._losses[-1] for loss in self._losses) <= len(self._losses) / 4
        return small and min(self._idle(other), self._choices - self._explored_at) >= self.every

    def _idle(self, action: Action) -> int:
        """Choices since ``action`` was last observed."""
        return self._choices - self._seen_at[action]

    def _try(self, unknown: list[Action], tokens: int) -> Action:
        """A way, while ``unknown`` were never observed."""
        usual = next((a for a in Action if a not in unknown), Action.SWAP if tokens <= self.start else Action.RECOMPUTE)
        wanted = min(unknown, key=lambda action: (self._tries[action], action is not usual))
        if self._choices < 4 ** self._tries[wanted]:
            return usual
        self._tries[wanted] += 1
        return wanted
