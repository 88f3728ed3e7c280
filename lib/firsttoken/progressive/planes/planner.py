"""Which split to stage a model by: measured on the model, within a budget of bytes or a bound on what is lost."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor
from transformers import PreTrainedModel

from firsttoken.assets.corpora import running_text, token_windows
from firsttoken.progressive.planes.coarse import coarse, coded_bytes
from firsttoken.progressive.planes.files import STORED
from firsttoken.progressive.planes.layouts import SPLITS, planes_of
from firsttoken.progressive.quality import text_scores
from firsttoken.progressive.served import load_served
from firsttoken.progressive.staging import RANDOM
from firsttoken.study.errors import StageError
from firsttoken.study.profile import Profile

AUTO = "auto"
CONSIDERED = tuple(split for split in SPLITS if planes_of(split) == 2)
WINDOWS, WINDOW_TOKENS = 8, 256  # of text that no adapter was trained on


@dataclass(frozen=True)
class Sensitivity:
    """What the first stage of ``split`` weighs, of the plain bytes, and by how many % it raises perplexity."""

    split: str
    first_share: float
    lost_pct: float


def measured(profile: Profile) -> list[Sensitivity]:
    """The model of ``profile`` by every split that is considered, on running text; half a minute for 135 M weights.

    Raises StageError for random weights, a model without a tokenizer, and weights of a dtype that no split cuts.
    """
    if profile.model.startswith(RANDOM):
        raise StageError("random weights say nothing of text, so nothing can be lost: name a split for --planes")
    served = load_served(profile)
    windows = token_windows(running_text("validation"), served.tokenizer, WINDOW_TOKENS, WINDOWS)
    return sensitivities(served.model, windows, STORED[served.stored or served.model.dtype])


def sensitivities(model: PreTrainedModel, windows: Tensor, dtype: str) -> list[Sensitivity]:
    """``model`` stored as ``dtype`` ("BF16"), on ``windows`` [count, tokens]."""

    def loss(one: PreTrainedModel) -> float:
        return sum(row["text_nll"] for row in text_scores(one, windows)) / len(windows)

    with coarse(model, "lossless", dtype) as rounded:
        exact = loss(rounded)
    found = []
    for split in CONSIDERED:
        size = coded_bytes(model, split, dtype)
        with coarse(model, split, dtype) as first:
            found.append(Sensitivity(split, size.first / size.plain, 100 * math.expm1(loss(first) - exact)))
    return found


def choose(found: Sequence[Sensitivity], budget: float | None = None, bound: float | None = None) -> Sensitivity:
    """The split that loses least within ``budget``, a share of the plain bytes; without a budget the smallest that
    loses ``bound`` % of perplexity at most. With both, both hold.

    Raises StageError where none does.
    """
    affordable = [one for one in found if budget is None or one.first_share <= budget]
    if not affordable:
        least = min(found, key=lambda one: one.first_share)
        raise StageError(
            f"no first stage comes to {budget:g} of the bytes: the least is {least.split!r} with "
            f"{least.first_share:.3f}"
        )
    good = [one for one in affordable if bound is None or one.lost_pct <= bound]
    if not good:
        best = min(affordable, key=lambda one: one.lost_pct)
        raise StageError(
            f"no first stage that may be taken loses {bound:g} % of perplexity or less: {best.split!r} loses least, "
            f"{best.lost_pct:.1f} %"
        )
    return min(good, key=lambda one: one.first_share if budget is None else one.lost_pct)
