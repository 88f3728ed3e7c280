"""How much longer attention takes where the decoding requests of a batch are unevenly long, as profiled."""

from __future__ import annotations

import math
import re
from bisect import bisect_left
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from firsttoken.engine.costs.tables import MEND, number, rows
from firsttoken.study.errors import CorpusError

_LABEL = re.compile(r"[A-Za-z]+(<=|=|>)(\d+)(k|%)?")
_UNIT = {"k": 1024.0, "%": 0.01, None: 1.0}
LABELS = ("n_label", "skew_rate_label", "kv_big_label", "kp_label")


@dataclass(frozen=True)
class Unevenness:
    """Where between a batch at its mean context (0) and one at its longest (1) an uneven batch lies, by bucket.

    ``shares`` are keyed by the upper ends of the buckets: prefill chunk, decodes, evenness, longest context, prefix.
    ``otherwise`` is the mean over the samples, for a bucket that was not measured.
    """

    shares: dict[tuple[float, ...], float]
    ends: tuple[tuple[float, ...], ...]
    otherwise: float

    @classmethod
    def read(cls, path: Path) -> Unevenness:
        """The table that a profile brings. Raises CorpusError naming file, line and mend."""
        shares: dict[tuple[float, ...], float] = {}
        samples = total = 0.0
        for line, row in rows(path, ("pc", *LABELS, "alpha", "n_samples")):
            key = (number(path, line, row, "pc"), *(_end(path, line, row[name]) for name in LABELS))
            if key in shares:
                raise CorpusError(f"{path}, line {line}: this bucket is there twice; {MEND}")
            shares[key] = number(path, line, row, "alpha", least=-math.inf)
            weight = number(path, line, row, "n_samples")
            samples, total = samples + weight, total + weight * shares[key]
        ends = tuple(tuple(sorted({key[place] for key in shares})) for place in range(1 + len(LABELS)))
        return cls(shares, ends, total / samples if samples else 0.0)

    def share(self, chunk: float, prefix: float, decodes: int, longest: int, evenness: float) -> float:
        """The share for a batch; ``evenness`` is (mean - least) / (longest - least) of its contexts."""
        near = _nearest(self.ends[0], chunk)
        rest = zip(self.ends[1:], (decodes, evenness, longest, prefix), strict=True)
        key = (near, *(ends[min(bisect_left(ends, value), len(ends) - 1)] for ends, value in rest))
        return self.shares.get(key, self.otherwise)


@lru_cache(maxsize=4096)  # steps that prefill nothing, or a full budget, are most
def _nearest(chunks: tuple[float, ...], chunk: float) -> float:
    """Of ``chunks``, by their ratio."""
    return min(chunks, key=lambda at: abs(math.log2(1 + at) - math.log2(1 + chunk)))


def _end(path: Path, line: int, label: str) -> float:
    """The upper end of a bucket: 128 of "n<=128", 0 of "kp=0", infinity of "sr>70%"."""
    found = _LABEL.fullmatch(label or "")
    if found is None:
        raise CorpusError(f"{path}, line {line}: {label!r} is no bucket such as n<=128; {MEND}")
    sign, digits, unit = found.groups()
    return math.inf if sign == ">" else float(digits) * _UNIT[unit]
