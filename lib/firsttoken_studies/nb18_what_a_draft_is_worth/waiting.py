"""What should wait, by the drafts that stay: layers and bits chosen on some prompts, and judged on others.

A greedy draft stays as far as a stage says, behind the whole model's own answer so far, what that goes on with. So one
prefill of prompt and answer by a stage tells how much of its draft would stay, and many stages can be tried.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple

import torch
from transformers import PreTrainedModel

from firsttoken.assets.corpora import load_qa, running_text, token_windows
from firsttoken.assets.needs import CONTEXT, ModelFacts, Need, check, questions_of, text_of
from firsttoken.engine.sampling import argmax_tokens
from firsttoken.progressiveserve.base_model import ServedConfig, ServedModel, load_base, passing
from firsttoken.progressiveserve.distance import angular_distances, choose_block
from firsttoken.progressiveserve.evaluation import QualityConfig
from firsttoken.study.errors import ProfileError
from firsttoken.study.profile import Profile
from firsttoken.study.progress import track
from firsttoken.study.stats import bootstrap, paired_bootstrap
from firsttoken.study.summary import Summary
from firsttoken_extras.bitplanes.first_stage import PlanSpec, coarse, layer_bytes
from firsttoken_extras.bitplanes.layouts import SPLITS
from firsttoken_studies.nb14_how_many_layers_may_wait.study import search_block
from firsttoken_studies.nb18_what_a_draft_is_worth.study import CHAT, answers_of, chat_prompt
from firsttoken_studies.record.results import Outcome, Rows, distinct, rows_where

DISTANCE, PERPLEXITY, IN_A_ROW, ANY = "angular distance", "perplexity", "drafts, in a row", "drafts, any"
UNIFORM, MIXED = "alike", "by drafts"


@dataclass(frozen=True)
class WaitsConfig:
    """Chats of ``tokens`` tokens: ``search`` of them choose and ``judge`` others judge, ``batch`` at a time.

    As many layers wait as the served plan has; the ``tried`` whose absence alone costs least are tried next to those
    that wait already. Each layer has one of ``splits``, from the finest to the coarsest, and all together have the
    bytes of ``budgets``, which are splits that all layers have alike. Distance and perplexity look at ``windows`` of
    ``window_tokens`` tokens of text.
    """

    search: int
    judge: int
    tokens: int
    batch: int
    tried: int
    splits: tuple[str, ...]
    budgets: tuple[str, ...]
    windows: int
    window_tokens: int

    def __post_init__(self) -> None:
        if unknown := next((split for split in (*self.splits, *self.budgets) if split not in SPLITS), ""):
            raise ProfileError(f"waits: no split of weights is called {unknown!r}; known: {', '.join(SPLITS)}")

    def needs(self, questions: str) -> list[Need]:
        """Require the questions of both halves, and a text that fills all windows."""
        return [
            Need("waits.search", self.search, questions_of(questions, "validation")),
            Need("waits.judge", self.judge, questions_of(questions, "test")),
            Need("waits.window_tokens", self.window_tokens, CONTEXT),
            Need("waits.windows x window_tokens", self.windows * self.window_tokens, text_of("train")),
        ]


@dataclass(frozen=True)
class Mixed(PlanSpec):
    """A plan in which the layers of ``by_layer`` are cut by splits of their own."""

    by_layer: Mapping[int, str] = field(default_factory=dict)

    def split_of(self, layer: int | None) -> str:
        return super().split_of(layer) if layer is None else self.by_layer.get(layer, super().split_of(layer))


class Arrived(NamedTuple):
    """``plan`` says what has arrived, and ``first_share`` its share of the plain bytes; ``arrived`` makes the whole
    model into it for a while."""

    plan: str
    first_share: float
    arrived: Callable[[PreTrainedModel], AbstractContextManager[PreTrainedModel]]


class ChatAnswer(NamedTuple):
    """A prompt, and what the whole model says to it."""

    prompt: list[int]
    tokens: list[int]


def what_waits(profile: Profile) -> Outcome:
    """Each way to choose what waits, and how much of a draft then stays of each chat that did not choose."""
    config, quality = profile.section("waits", WaitsConfig), profile.section("quality", QualityConfig)
    served_config = profile.section("served", ServedConfig)
    needs = [*served_config.needs(), *config.needs(quality.closed_book_questions)]
    check(needs, ModelFacts(profile.model))
    served = load_base(replace(profile, dtype="float32"))
    rows: Rows = []
    with coarse(served.model, PlanSpec("lossless"), "BF16") as full_model:
        search, judge = (
            _answers(served, full_model, config, quality.closed_book_questions, split, count)
            for split, count in (("validation", config.search), ("test", config.judge))
        )
        stages = _by_layers(served, full_model, config, search) | _by_bits(full_model, config, search)
        for (rule, case), stage in track(stages.items(), desc="judged", unit="stage"):
            with stage.arrived(full_model) as model:
                counts = kept_of(model, judge, config.batch)
            labels = {"variant": rule, "case": case, "first_share": stage.first_share, "plan": stage.plan}
            rows += [
                labels | {"prompt": i, "kept": count, "of": len(judge[i].tokens)} for i, count in enumerate(counts)
            ]
    return Outcome(rows, provenance=served.provenance)


def _answers(
    served: ServedModel, full_model: PreTrainedModel, config: WaitsConfig, questions: str, split: str, count: int
) -> list[ChatAnswer]:
    prompts = [chat_prompt(served.tokenizer, item.question) for item in load_qa(questions, split)[:count]]
    answers = answers_of(full_model, served.tokenizer, CHAT, prompts, config.tokens, config.batch)
    return [ChatAnswer(*pair) for pair in zip(prompts, answers, strict=True)]


@torch.inference_mode()
def kept_of(stage: PreTrainedModel, answers: Sequence[ChatAnswer], batch: int) -> list[int]:
    """Return of each of ``answers`` the number of tokens that a draft of ``stage`` would have right up to its first
    mistake."""
    counts: list[int] = []
    for first in range(0, len(answers), batch):
        part = answers[first : first + batch]
        width = max(len(answer.prompt) + len(answer.tokens) for answer in part)
        ids = torch.zeros(len(part), width, dtype=torch.long)
        for row, answer in zip(ids, part, strict=True):
            row[: len(answer.prompt) + len(answer.tokens)] = torch.tensor([*answer.prompt, *answer.tokens])
        stream = stage.get_decoder()(ids, use_cache=False).last_hidden_state
        for hidden, (prompt, tokens) in zip(stream, part, strict=True):
            logits = stage.get_output_embeddings()(hidden[len(prompt) - 1 : len(prompt) + len(tokens) - 1])
            same = argmax_tokens(logits) == torch.tensor(tokens)
            counts.append(int(same.long().cumprod(0).sum()))
    return counts


def _by_layers(
    served: ServedModel, full_model: PreTrainedModel, config: WaitsConfig, search: Sequence[ChatAnswer]
) -> dict[tuple[str, str], Arrived]:
    """The layers that wait by each rule."""
    depth, size = served.plan.depth, len(served.plan.block)
    windows = token_windows(running_text("train"), served.tokenizer, config.window_tokens, config.windows)

    def stays(waiting: Iterable[int]) -> int:
        with passing(full_model, tuple(waiting)) as stage:
            return sum(kept_of(stage, search, config.batch))

    in_a_row = [tuple(range(first, first + size)) for first in range(depth - size + 1)]
    alone = {layer: stays([layer]) for layer in track(range(depth), desc="layers alone", unit="layer")}
    chosen: list[int] = []
    for _ in track(range(size), desc="layers that wait", unit="layer"):
        candidates = sorted(set(alone) - set(chosen), key=lambda layer: -alone[layer])[: config.tried]
        chosen.append(max(candidates, key=lambda layer: stays([*chosen, layer])))
    by_rule = {
        DISTANCE: choose_block(angular_distances(full_model, windows), size),
        PERPLEXITY: search_block(replace(served, model=full_model), windows, size),
        IN_A_ROW: max(track(in_a_row, desc="blocks", unit="block"), key=stays),
        ANY: sorted(chosen),
    }
    sizes = {layer: size.plain for layer, size in layer_bytes(full_model, PlanSpec("lossless"), "BF16").items()}
    return {
        (rule, "layers"): Arrived(
            f"layers {', '.join(map(str, layers))} wait",
            1 - sum(sizes[layer] for layer in layers) / sum(sizes.values()),
            partial(passing, layers=tuple(layers)),
        )
        for rule, layers in by_rule.items()
    }


def _by_bits(
    full_model: PreTrainedModel, config: WaitsConfig, search: Sequence[ChatAnswer]
) -> dict[tuple[str, str], Arrived]:
    """All layers alike in each budget, and layers of different bits in as many bytes."""
    sizes = {split: layer_bytes(full_model, PlanSpec(split), "BF16") for split in {*config.splits, *config.budgets}}
    plain = sum(size.plain for size in sizes[config.splits[0]].values())
    layers = [layer for layer in sizes[config.splits[0]] if layer is not None]

    def stays(by_layer: Mapping[int, str]) -> int:
        with coarse(full_model, Mixed("lossless", by_layer=by_layer), "BF16") as stage:
            return sum(kept_of(stage, search, config.batch))

    cells = [(layer, split) for split in config.splits for layer in layers]
    alone = {cell: stays(dict([cell])) for cell in track(cells, desc="layers of fewer bits", unit="layer")}
    stages: dict[tuple[str, str], Arrived] = {}
    for budget in config.budgets:
        other_bytes = sizes[budget][None].first
        most = sum(size.first for size in sizes[budget].values())
        by_layer = coarsened(
            layers, config.splits, lambda layer, split: sizes[split][layer].first, alone, most - other_bytes
        )
        taken = other_bytes + sum(sizes[split][layer].first for layer, split in by_layer.items())
        for rule, size, plan in ((UNIFORM, most, PlanSpec(budget)), (MIXED, taken, Mixed(budget, by_layer=by_layer))):
            words = ", ".join(f"layer {layer}: {plan.split_of(layer)}" for layer in layers)
            stages[rule, budget] = Arrived(words, size / plain, partial(coarse, plan_spec=plan, dtype="BF16"))
    return stages


def coarsened(
    layers: Sequence[int],
    splits: Sequence[str],
    size: Callable[[int, str], int],
    stays: Mapping[tuple[int, str], int],
    most: int,
) -> dict[int, str]:
    """The split of each layer: all begin with the first of ``splits``, and the layer that loses fewest kept tokens a
    byte takes the next one, until all have ``most`` bytes. Raises ProfileError where the last split has more."""
    steps = dict.fromkeys(layers, 0)

    def loss(layer: int) -> float:
        now, after = splits[steps[layer]], splits[steps[layer] + 1]
        return (stays[layer, now] - stays[layer, after]) / (size(layer, now) - size(layer, after))

    if (least := sum(size(layer, splits[-1]) for layer in layers)) > most:
        raise ProfileError(f"waits.budgets: {splits[-1]} in every layer take {least:,} bytes, the budget has {most:,}")
    while sum(size(layer, splits[step]) for layer, step in steps.items()) > most:
        steps[min((layer for layer, step in steps.items() if step + 1 < len(splits)), key=loss)] += 1
    return {layer: splits[step] for layer, step in steps.items()}


def waiting_summary(rows: Rows, _: Mapping[str, Any]) -> Summary:
    """Summarize by rule the share of an answer that its draft would have had, and how much more that is than by the
    rule that it is held against: layers by angular distance, bits that all layers have alike."""
    summary = Summary()
    for case in distinct(rows, "case"):
        of_case = rows_where(rows, case=case)
        shares = {
            name: [100 * row["kept"] / row["of"] for row in rows_where(of_case, variant=name)]
            for name in distinct(of_case, "variant")
        }
        base = UNIFORM if UNIFORM in shares else DISTANCE
        for name, percents in shares.items():
            labels = {"variant": name, "case": case}
            summary.add("kept_pct", bootstrap(percents).summary("% of an answer"), **labels)
            (first,) = distinct(of_case, "first_share", variant=name)
            summary.add("byte_share", {"value": first, "unit": "of the plain bytes"}, **labels)
            if name != base:
                summary.add(
                    "gain_points", paired_bootstrap(percents, shares[base]).summary("points"), **labels, than=base
                )
    return summary
