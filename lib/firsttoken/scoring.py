"""Answer scores: exact match and token F1 as the official SQuAD scripts have them, ROUGE-L, edit similarity.

The reports ask for SQuAD's normalisation (ProgressiveServe, 3.1.2), F1, ROUGE-L and edit similarity (DroidSpeak, 5.1).
Empty answers are scored as in v2.0 of SQuAD's script; v1.1 has none.
"""

import re
import string
from collections import Counter
from collections.abc import Iterable

_ARTICLES = re.compile(r"\b(a|an|the)\b")
_ROUGE_WORD = re.compile(r"[a-z0-9]+")  # rouge-score's: an accented letter parts words
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


def rouge_l(prediction: str, answers: Iterable[str]) -> float:
    """The best F-measure over the answers of the longest common subsequence of words, in 0..1.

    As rougeL of the rouge-score package without stemming, of which each answer is one sentence; 0.0 where either side
    has no word.
    """
    from rapidfuzz.distance import Indel  # 1 - distance / (both lengths) = 2 LCS / (both lengths): the F-measure

    predicted = _ROUGE_WORD.findall(prediction.lower())
    golds = [_ROUGE_WORD.findall(a.lower()) for a in _or_empty(answers)]
    return max(Indel.normalized_similarity(predicted, gold) if predicted and gold else 0.0 for gold in golds)


def edit_similarity(prediction: str, answers: Iterable[str]) -> float:
    """The best similarity of characters over the answers, in 0..1: twice the common subsequence over both lengths.

    LongBench calls it code similarity (``fuzz.ratio`` / 100); two empty texts have 1.0.
    """
    from rapidfuzz.distance import Indel

    return max(Indel.normalized_similarity(prediction, a) for a in _or_empty(answers))


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
