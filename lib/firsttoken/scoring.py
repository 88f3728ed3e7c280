"""Answer scores as the official SQuAD scripts define them: normalise, then exact match and token F1.

The report asks for that normalisation (ProgressiveServe, 3.1.2). Empty answers are scored as in v2.0; v1.1 has none.
"""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Iterable

_ARTICLES = re.compile(r"\b(a|an|the)\b")
_PUNCTUATION = frozenset(string.punctuation)  # ASCII only, as in the official script: a typographic quote stays


def normalise(text: str) -> str:
    """Lower case, ASCII punctuation out, articles out, white space folded."""
    text = "".join(c for c in text.lower() if c not in _PUNCTUATION)
    return " ".join(_ARTICLES.sub(" ", text).split())


def exact_match(prediction: str, answers: Iterable[str]) -> float:
    """1.0 if the normalised prediction equals any normalised answer, else 0.0; no answers count as the empty one."""
    return max(float(normalise(prediction) == normalise(a)) for a in _or_empty(answers))


def token_f1(prediction: str, answers: Iterable[str]) -> float:
    """The best token F1 over the answers, in 0..1. Where either side is empty, 1.0 only if both are."""
    return max(_f1(normalise(prediction).split(), normalise(a).split()) for a in _or_empty(answers))


def _f1(predicted: list[str], gold: list[str]) -> float:
    if not predicted or not gold:
        return float(predicted == gold)
    common = sum((Counter(predicted) & Counter(gold)).values())
    if common == 0:
        return 0.0
    precision, recall = common / len(predicted), common / len(gold)
    return 2 * precision * recall / (precision + recall)


def _or_empty(answers: Iterable[str]) -> list[str]:
    return list(answers) or [""]
