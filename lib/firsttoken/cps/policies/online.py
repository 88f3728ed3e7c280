"""The cross-point found and followed while serving: what the paper leaves for future work (section 5)."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import replace

import numpy as np

from firsttoken.engine.costs.fitted import non_negative
from firsttoken.engine.preemption.preemption_policy import Action, Observation, PreemptionPolicy
from firsttoken.study.errors import ProfileError

# What a recovery costs by its length, learned one observation at a time from a system that changes.

_RIDGE = np.diag([1e-2, 1e-3, 1e-2])  # of what is known of each term: one observation alone is read as proportional
_NO_TIME_S = 1e-9  # stands for 0 s, which a clock may say; errors are relative
_RUN = 3  # surprises on one side that make a change
_KEPT = 0.2  # of the weight of what was known before a change: its shape still holds, its scale does not
_FIRST_DOUBT = 3.0  # a first observation may be up to e^3 = 20 times too slow: it may have paid for setting up
_WAYS = (Action.SWAP, Action.RECOMPUTE)  # that it learns the costs of
_FADE = 25.0  # choices in which half of a doubt turns into hope


class CostCurve:
    """seconds(tokens) = fixed + a * tokens + b * tokens², none negative, by recursive least squares with forgetting.

    Errors are relative: an observation weighs 1 / predicted². About ``memory`` observations count, older ones fade.
    The sums of products are kept, and not their inverse: a direction that nobody observes any more fades into the
    ridge and keeps a finite answer.

    An error beyond the limit, three times the usual one and 25 % at least, is no noise. Where the curve was a guess, at
    a length far from what it remembers (its leverage widens the limit), the observation is simply learned, and weighs
    1 / seen². Elsewhere it is a surprise. One alone is cut to the limit, since a copy or a kernel may stall. Three on
    one side are a change: the curve is moved by their median ratio, what it knew loses four fifths of its weight, and
    they are learned in full. A surprise on the fast side is believed at once where the curve is old or rests on few
    observations, since nothing takes less time than it needs.

    Slowness is doubted: a first observation, or a change to the slow side, may be passing. ``hope`` says what the cost
    is if it was; each further observation that does not contradict leaves a quarter of the doubt.
    """

    def __init__(self, memory: float) -> None:
        self.seen = 0
        self._keep = 1 - 1 / memory
        self._products = np.zeros((3, 3))
        self._targets = np.zeros(3)
        self._prices = np.zeros(3)
        self._size = np.ones(3)  # of the terms, as they were remembered
        self._inverse = np.zeros((3, 3))  # of the products of terms of size 1
        self._variance = 0.1**2
        self._run: list[tuple[int, float]] = []
        self._run_is_slow = False
        self._doubt = 0.0

    def predict(self, tokens: int) -> float:
        """Seconds for ``tokens`` (1 or more); above 0 once anything was seen."""
        return float(_terms(tokens) @ self._prices)

    def hope(self, tokens: int, idle: int) -> float:
        """Seconds if the slowness in doubt has passed; the longer nobody looked (``idle`` choices), the fewer."""
        return self.predict(tokens) * math.exp(-self._doubt * (1 - 0.5 ** (idle / _FADE)))

    def learn(self, tokens: int, seconds: float, old: bool) -> None:
        """Take in one observation; ``old`` says that it is the first after a long time."""
        self.seen += 1
        seconds = max(seconds, _NO_TIME_S)
        if self.seen == 1:
            self._doubt = _FIRST_DOUBT
            self._add(tokens, seconds, seconds)
            return
        self._doubt /= 4
        predicted = self.predict(tokens)
        error, limit = math.log(seconds / predicted), max(3 * math.sqrt(self._variance), 0.25)
        if abs(error) <= limit:
            self._end_run(limit)
            self._remember_error(error)
            self._add(tokens, seconds, predicted)
        elif abs(error) <= limit * math.sqrt(1 + self._leverage(tokens, predicted)):
            self._add(tokens, seconds, seconds)
        else:
            if self._run_is_slow != (error > 0):
                self._end_run(limit)
            self._run.append((tokens, seconds))
            self._run_is_slow = error > 0
            if len(self._run) == _RUN or (error < 0 and (old or self.seen <= _RUN)):
                self._change()
            else:
                self._add(tokens, predicted * math.exp(math.copysign(limit, error)), predicted)

    def _leverage(self, tokens: int, predicted: float) -> float:
        """The variance of the prediction, in units of that of one observation."""
        terms = _terms(tokens) / predicted / self._size
        return float(terms @ self._inverse @ terms)

    def _change(self) -> None:
        """Move the curve to where the run of surprises is, and learn from them."""
        ratio = float(np.median([seconds / self.predict(tokens) for tokens, seconds in self._run]))
        self._doubt = max(math.log(ratio), 0.0)
        self._products *= _KEPT / ratio**2
        self._targets *= _KEPT / ratio
        self._prices *= ratio
        run, self._run = self._run, []
        for tokens, seconds in run:
            self._add(tokens, seconds, self.predict(tokens))

    def _end_run(self, limit: float) -> None:
        """End the run of surprises: those that were no change are noise, and widen the limit."""
        for _ in self._run:
            self._remember_error(limit)
        self._run.clear()

    def _remember_error(self, error: float) -> None:
        self._variance = self._keep * self._variance + (1 - self._keep) * error**2

    def _add(self, tokens: int, seconds: float, scale: float) -> None:
        """Learn ``seconds`` with the weight 1 / ``scale``²."""
        terms = _terms(tokens) / scale
        self._products = self._keep * self._products + np.outer(terms, terms)
        self._targets = self._keep * self._targets + terms * (seconds / scale)
        self._size = np.sqrt(np.diag(self._products))  # lengths may be tens of tokens or ten thousands
        products, targets = self._products / np.outer(self._size, self._size) + _RIDGE, self._targets / self._size
        self._inverse = np.linalg.inv(products)
        shares = self._inverse @ targets
        if (shares < 0).any():
            root = np.linalg.cholesky(products)
            shares = non_negative(root.T, np.linalg.solve(root, targets))
        self._prices = shares / self._size


def _terms(tokens: int) -> np.ndarray:
    """The basis [3] at a length."""
    return np.array([1.0, tokens, tokens * tokens])


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
    choice 4, 16, 64 and so on. ``memory`` is that of the curves, in observations, and ``curve`` their class.
    """

    name = "online"

    def __init__(
        self,
        explore: float = 0.02,
        memory: float = 40,
        every: int = 10,
        start: float = 1024,
        curve: type[CostCurve] = CostCurve,
    ) -> None:
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
        self._curves = {action: curve(memory) for action in _WAYS}
        self._choices = 0
        self._tries = dict.fromkeys(_WAYS, 0)
        self._seen_at = dict.fromkeys(_WAYS, 0)  # in choices
        self._explored_at = 0
        self._prefill: Observation | None = None  # of the step that may have had more
        self._losses: deque[float] = deque(maxlen=_RECENT)

    def predict(self, action: Action, tokens: int) -> float:
        """Seconds that ``action`` is expected to take; 0 while it was never observed."""
        return self._curves[action].predict(tokens)

    def choose(self, tokens: int, now_s: float) -> Action:
        self._learn_prefill()
        self._choices += 1
        unknown = [action for action in _WAYS if not self._curves[action].seen]
        if unknown:
            return self._try(unknown, tokens)
        best, other = sorted(_WAYS, key=lambda action: self.predict(action, tokens))
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

    def observe(self, observation: Observation) -> None:
        if observation.action is Action.SWAP:
            self._learn(observation)
            return
        before = self._prefill
        if before is not None and observation.now_s - before.now_s < observation.seconds:
            tokens, seconds = before.tokens + observation.tokens, before.seconds + observation.seconds
            observation = replace(observation, tokens=tokens, seconds=seconds)
        else:
            self._learn_prefill()
        self._prefill = observation

    def _learn_prefill(self) -> None:
        if self._prefill is not None:
            self._learn(self._prefill)
            self._prefill = None

    def _learn(self, observation: Observation) -> None:
        self._curves[observation.action].learn(
            observation.tokens, observation.seconds, old=self._idle(observation.action) >= self.every
        )
        self._seen_at[observation.action] = self._choices

    def _is_due(self, other: Action) -> bool:
        """Return whether to look again: nobody looked for a while, and the last of the losses is small among the recent
        ones."""
        small = sum(loss < self._losses[-1] for loss in self._losses) <= len(self._losses) / 4
        return small and min(self._idle(other), self._choices - self._explored_at) >= self.every

    def _idle(self, action: Action) -> int:
        """Choices since ``action`` was last observed."""
        return self._choices - self._seen_at[action]

    def _try(self, unknown: list[Action], tokens: int) -> Action:
        """Choose an action to try while ``unknown`` were never observed."""
        usual = next((a for a in _WAYS if a not in unknown), Action.SWAP if tokens <= self.start else Action.RECOMPUTE)
        wanted = min(unknown, key=lambda action: (self._tries[action], action is not usual))
        if self._choices < 4 ** self._tries[wanted]:
            return usual
        self._tries[wanted] += 1
        return wanted
