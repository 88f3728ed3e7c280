"""Which plan to stage a model by: from what its parts lose, within a budget of bytes or a bound on what is lost."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from torch import Tensor
from tqdm import tqdm
from transformers import PreTrainedModel

from firsttoken.assets.corpora import running_text, token_windows
from firsttoken.progressiveserve.base_model import ServedModel, load_served
from firsttoken.progressiveserve.quality import text_scores
from firsttoken.progressiveserve.staging import RANDOM
from firsttoken.study.errors import StageError
from firsttoken.study.profile import Profile
from firsttoken.study.record import load_result
from firsttoken_extras.bitplanes.encode import STORED_AS
from firsttoken_extras.bitplanes.first_stage import coarse, layer_bytes
from firsttoken_extras.bitplanes.layouts import SPLITS, planes_of
from firsttoken_extras.bitplanes.plan_spec import LaterLayers, PlanSpec

CONSIDERED = tuple(split for split in SPLITS if planes_of(split) == 2)
EXACT = "lossless"
WINDOWS, WINDOW_TOKENS = 8, 256  # of text that no adapter was trained on
TRIED = 3  # of the plans that lose least by their parts


@dataclass(frozen=True)
class TextLoss:
    """What ``model``, stored as ``dtype`` ("BF16"), loses on ``windows`` [count, tokens]."""

    model: PreTrainedModel
    windows: Tensor
    dtype: str
    exact: float = 0.0  # nats a token of the exact weights

    def nats(self, plan_spec: PlanSpec) -> float:
        """Nats a token that the first stage loses."""
        with coarse(self.model, plan_spec, self.dtype) as first:
            return sum(row["text_nll"] for row in text_scores(first, self.windows)) / len(self.windows) - self.exact

    def lost_pct(self, plan_spec: PlanSpec) -> float:
        """Return by how many % the first stage raises perplexity."""
        return 100 * math.expm1(self.nats(plan_spec))


@dataclass(frozen=True)
class Planned:
    """What the first stage of ``plan_spec`` weighs, of the plain bytes, and by how many % it raises perplexity."""

    plan_spec: PlanSpec
    first_share: float
    lost_pct: float


@dataclass(frozen=True)
class Sensitivities:
    """What the parts of a model weigh first, of the plain bytes, and what each loses alone, in nats a token.

    ``shares`` are by split and layer, None for the ends; ``layers`` and ``ends`` what all layers, or the ends, lose by
    a split; ``blocks`` what it loses that the layers from one to before another are not there.
    """

    shares: Mapping[str, Mapping[int | None, float]]
    layers: Mapping[str, float]
    ends: Mapping[str, float]
    blocks: Mapping[tuple[int, int], float]

    def planned(self, plan_spec: PlanSpec) -> Planned:
        """``plan_spec`` as the sum of its parts. That is the assumption: what parts lose, as nats, adds up, and all
        layers lose alike by a split. It holds to first order; what is chosen is therefore measured itself."""
        depth = len(self.shares[plan_spec.split]) - 1
        there = [layer for layer in range(depth) if layer not in plan_spec.waiting]
        share = sum(self.shares[plan_spec.split_of(layer)][layer] for layer in (None, *there))
        lost = self.layers[plan_spec.split] * len(there) / depth + self.ends[plan_spec.split_of(None)]
        lost += sum(self.blocks[one.first, one.end] for one in plan_spec.later)
        return Planned(plan_spec, share, 100 * math.expm1(lost))


def measured(profile: Profile) -> tuple[TextLoss, Sensitivities]:
    """The model of ``profile`` on running text, by every split of its layers and of its ends.

    Raises StageError for random weights, a model without a tokenizer, and weights of a dtype that no split cuts.
    """
    if profile.model.startswith(RANDOM):
        raise StageError("random weights say nothing of text, so nothing can be lost: name a plan for --planes")
    served = load_served(profile)
    windows = token_windows(running_text("validation"), served.tokenizer, WINDOW_TOKENS, WINDOWS)
    text = TextLoss(served.model, windows, STORED_AS[served.stored or served.model.dtype])
    return sensitivities(text, recorded_blocks(served))


def sensitivities(text: TextLoss, blocks: Mapping[tuple[int, int], float]) -> tuple[TextLoss, Sensitivities]:
    """The parts of a model, each by every split while the others are exact; and ``text`` with its ``exact``."""
    text = replace(text, exact=replace(text, exact=0.0).nats(PlanSpec(EXACT)))
    shares, layers, ends = {}, {}, {EXACT: 0.0}
    for split in tqdm((*CONSIDERED, EXACT), desc="sensitivities", unit="split", disable=None):
        sizes = layer_bytes(text.model, PlanSpec(split), text.dtype)
        plain = sum(size.plain for size in sizes.values())
        shares[split] = {layer: size.first / plain for layer, size in sizes.items()}
        if split != EXACT:
            layers[split] = text.nats(PlanSpec(split, ends=EXACT))
            ends[split] = text.nats(PlanSpec(EXACT, ends=split))
    return text, Sensitivities(shares, layers, ends, blocks)


def recorded_blocks(served: ServedModel) -> dict[tuple[int, int], float]:
    """What it loses, in nats a token, that layers in a row wait: as ``deferral_sweep`` was recorded with the same
    weights (its blocks are the best by distance, and by perplexity). Nothing where it was not: then no layers wait."""
    result = load_result("deferral_sweep", machine="any")
    pins = ("sha256", "task_adapter_sha256")
    if result is None or any(result.provenance.get(pin) != served.provenance.get(pin) for pin in pins):
        return {}
    found: dict[tuple[int, ...], list[float]] = {}
    for row in result.rows:
        if row.get("task") == "text" and row["selection"] != "healed":
            found.setdefault(tuple(row["block"]), []).append(row["text_nll"])
    losses = {block: sum(values) / len(values) for block, values in found.items()}
    return {(block[0], block[-1] + 1): loss - losses[()] for block, loss in losses.items() if block}


def worth_it(found: Sensitivities) -> list[Planned]:
    """Return, of all mixtures of one split for the layers, one for the ends and one block that waits or none, those
    that no other beats in bytes and loss both; by bytes. All are looked at, so none is missed where losses add up."""
    kept: list[Planned] = []
    for one in sorted(map(found.planned, _all(found)), key=lambda one: (one.first_share, one.lost_pct)):
        if not kept or one.lost_pct < kept[-1].lost_pct:
            kept.append(one)
    return kept


def _all(found: Sensitivities) -> Iterator[PlanSpec]:
    for split in found.layers:
        for ends in found.ends:
            for later in ((), *((LaterLayers(*block),) for block in found.blocks)):
                yield PlanSpec(split, later, "" if ends == split else ends)


def choose(
    found: Sensitivities, lost_pct: Callable[[PlanSpec], float], budget: float | None = None, bound: float | None = None
) -> Planned:
    """The plan that loses least within ``budget``, a share of the plain bytes; without a budget the smallest that
    loses ``bound`` % of perplexity at most. With both, both hold, as ``lost_pct`` measures it: of the TRIED that lose
    least by their parts within a budget, of those that keep to a bound from the smallest on.

    Raises StageError where none does.
    """
    steps = worth_it(found)
    within = [one for one in steps if budget is None or one.first_share <= budget]
    if not within:
        raise StageError(
            f"no first stage comes to {budget:g} of the bytes: the least is '{steps[0].plan_spec}' with "
            f"{steps[0].first_share:.3f}"
        )
    tried = within[-TRIED:] if budget is not None else [one for one in within if one.lost_pct <= bound] or within[-1:]
    best: Sequence[Planned] = []
    for one in tried:
        best = sorted([*best, replace(one, lost_pct=lost_pct(one.plan_spec))], key=lambda one: one.lost_pct)
        if budget is None and best[0].lost_pct <= bound:
            break
    if bound is not None and best[0].lost_pct > bound:
        raise StageError(
            f"no first stage that may be taken loses {bound:g} % of perplexity or less: '{best[0].plan_spec}' loses "
            f"least, {best[0].lost_pct:.1f} %"
        )
    return best[0]
