"""What keys and values that coarse weights wrote do to the tokens that exact weights make after the hand-over."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from firsttoken.engine.live import LiveExecutor
from firsttoken.link.shaped import Link
from firsttoken.progressiveserve.loading.loader import StageLoad
from firsttoken.progressiveserve.loading.skeleton import Skeleton
from firsttoken.progressiveserve.loading.views import StageView
from firsttoken.progressiveserve.recovery.limits import BLOCK_TOKENS
from firsttoken.progressiveserve.recovery.probe import Probe
from firsttoken.progressiveserve.recovery.transitions import TRANSITIONS, Transition
from firsttoken.progressiveserve.recovery.views import GrownView
from firsttoken.study.clock import synchronise
from firsttoken.study.measures import Summary
from firsttoken.study.record import Rows
from firsttoken.study.stats import bootstrap
from firsttoken_studies.progressiveserve.coldstart.materials import Checkpoint

KEEP, REDO = TRANSITIONS["naive"], TRANSITIONS["prefill again"]


class _Handed:
    """A checkpoint of which stages are brought one after another, in place, and requests that outlive it."""

    def __init__(
        self, checkpoint: Checkpoint, device: torch.device, dtype: torch.dtype, tokens: int, requests: int
    ) -> None:
        self._checkpoint, self.device = checkpoint, device
        self.skeleton = Skeleton(checkpoint.staged, checkpoint.manifest, device, dtype)
        self._each = -(-tokens // BLOCK_TOKENS)
        self._executor = LiveExecutor(
            self.skeleton.model, requests * self._each, block_tokens=BLOCK_TOKENS, device=device
        )
        self._view: StageView = self.skeleton.empty_view()
        self._begun = 0

    def bring(self, *stages: int) -> None:
        load = StageLoad(
            self._checkpoint.staged, self._checkpoint.manifest, stages, [Link()], self.skeleton, self._view
        )
        self._view = load.wait()

    def view(self, policy: Transition) -> GrownView:
        return GrownView(self.skeleton.model, self._view, policy)

    def begun(self, ids: Sequence[int]) -> Probe:
        """A request of ``ids`` under the last stage, with blocks of its own."""
        blocks = range(self._begun * self._each, (self._begun + 1) * self._each)
        self._begun += 1
        probe = Probe(self._executor, self.view(KEEP), blocks)
        probe.feed(ids)
        return probe


def handover_rows(
    checkpoint: Checkpoint,
    windows: Sequence[Sequence[int]],
    contexts: Sequence[int],
    following: int,
    device: torch.device,
    dtype: torch.dtype,
) -> Rows:
    """One row a window, context and position after the hand-over: how far the next token's chances are from those of
    exact weights on exact keys and values, in nats (KL), where the old ones are kept, and where weights stay coarse.

    The text of ``windows`` is what follows, whatever the model would have said. Rows of position 0 say what a prefill
    again takes, and a step.
    """
    last = len(checkpoint.manifest.stages)
    cases = [(index, context) for index in range(len(windows)) for context in contexts]
    model = _Handed(checkpoint, device, dtype, max(contexts) + following, 3 * len(cases))
    model.bring(1)
    text = {case: (windows[case[0]][: case[1]], windows[case[0]][case[1] : case[1] + following]) for case in cases}
    probes = {case: (model.begun(before[:-1]), model.begun(before[:-1])) for case, (before, _) in text.items()}
    coarse = {
        case: _told(model.begun(before[:-1]), [before[-1], *after[:-1]])
        for case, (before, after) in tqdm(text.items(), desc="first bits", unit="text", disable=None)
    }
    model.bring(*range(2, last + 1))
    rows: Rows = []
    for case, (kept, again) in tqdm(probes.items(), desc="after the hand-over", unit="text", disable=None):
        before, after = text[case]
        label = {"row": "handover", "window": case[0], "context_tokens": case[1]}
        rows.append(label | {"position": 0, "redo_ms": _ms(lambda p=again: p.carry(model.view(REDO), REDO), device)})
        kept.carry(model.view(KEEP), KEEP)
        fed = [before[-1], *after[:-1]]
        exact = _told(again, fed)
        pairs = zip(exact, _told(kept, fed), coarse.pop(case), strict=True)
        for position, (right, found, stale) in enumerate(pairs, 1):
            rows.append(
                label
                | {
                    "position": position,
                    "kl_kept": _divergence(right, found),
                    "kl_coarse": _divergence(right, stale),
                    "same_kept": bool(found.argmax() == right.argmax()),
                    "same_coarse": bool(stale.argmax() == right.argmax()),
                }
            )
    return rows


def same_logits(
    planes: Checkpoint, whole: Checkpoint, ids: Sequence[int], device: torch.device, dtype: torch.dtype
) -> bool:
    """Whether what came in planes says after ``ids``, bit by bit, what the plain whole model says."""
    said = []
    for checkpoint in (planes, whole):
        model = _Handed(checkpoint, device, dtype, len(ids), 1)
        for stage in range(1, len(checkpoint.manifest.stages) + 1):
            model.bring(stage)
        said.append(model.begun(ids[:-1]).feed(ids[-1:]))
    return torch.equal(*said)


def _told(probe: Probe, ids: Sequence[int]) -> Tensor:
    """Logits [tokens, vocabulary] after each of ``ids``."""
    return torch.stack([probe.feed([token]) for token in ids])


def _divergence(right: Tensor, found: Tensor) -> float:
    """KL of two distributions over the vocabulary in nats, from logits [vocabulary]."""
    exact, other = (logits.double().log_softmax(-1) for logits in (right, found))
    return float((exact.exp() * (exact - other)).sum())


def _ms(what: Any, device: torch.device) -> float:
    synchronise(device)
    begin = time.perf_counter()
    what()
    synchronise(device)
    return 1000 * (time.perf_counter() - begin)


def handover_summary(rows: Rows) -> Summary:
    """By length of the context: mean KL at the first position and over all, and how often the likeliest token
    is that of the exact weights, where keys and values are kept, beside weights that stay coarse; what a prefill again
    takes."""
    summary = Summary()
    for context in dict.fromkeys(row["context_tokens"] for row in rows):
        mine = [row for row in rows if row["context_tokens"] == context]
        after = [row for row in mine if row["position"]]
        first = [row for row in after if row["position"] == 1]
        taken = [row["redo_ms"] for row in mine if "redo_ms" in row]
        summary.add("redo_ms", bootstrap(taken, "median").summary("ms"), context_tokens=context)
        for name in ("kept", "coarse"):
            place = {"case": name, "context_tokens": context}
            summary.add("kl_first_nats", bootstrap([row[f"kl_{name}"] for row in first]).summary("nats"), **place)
            by_window: dict[int, list[dict[str, Any]]] = {}
            for row in after:
                by_window.setdefault(row["window"], []).append(row)
            for measure, what, unit, scale in (("kl_nats", "kl", "nats", 1), ("same_token_pct", "same", "%", 100)):
                means = [sum(row[f"{what}_{name}"] for row in part) / len(part) for part in by_window.values()]
                summary.add(measure, bootstrap(means).summary(unit, scale), **place)
    return summary
