"""What a recovery costs by its length, learned one observation at a time from a system that changes."""

from __future__ import annotations

import math

import numpy as np

from firsttoken.engine.costs.nnls import non_negative

_RIDGE = np.diag([1e-2, 1e-3, 1e-2])  # of what is known of each term: one observation alone is read as proportional
_NO_TIME_S = 1e-9  # stands for 0 s, which a clock may say; errors are relative
_RUN = 3  # surprises on one side that make a change
_KEPT = 0.2  # of the weight of what was known before a change: its shape still holds, its scale does not
_FIRST_DOUBT = 3.0  # a first observation may be up to e^3 = 20 times too slow: it may have paid for setting up
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
        """Move to where the run of surprises is, and learn it."""
        ratio = float(np.median([seconds / self.predict(tokens) for tokens, seconds in self._run]))
        self._doubt = max(math.log(ratio), 0.0)
        self._products *= _KEPT / ratio**2
        self._targets *= _KEPT / ratio
        self._prices *= ratio
        run, self._run = self._run, []
        for tokens, seconds in run:
            self._add(tokens, seconds, self.predict(tokens))

    def _end_run(self, limit: float) -> None:
        """Surprises that were no change are noise, and widen the limit."""
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
