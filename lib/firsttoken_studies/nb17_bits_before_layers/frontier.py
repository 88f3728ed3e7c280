"""Bytes before the first token against quality: bits that wait and layers that wait, trained only where it says so."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedModel

from firsttoken.assets.needs import ModelFacts, check
from firsttoken.engine.sampling import argmax_tokens
from firsttoken.progressiveserve.base_model import ServedConfig, ServedModel, at_stage, load_served
from firsttoken.progressiveserve.checkpoint.names import layer_of
from firsttoken.progressiveserve.evaluation import Evaluation, QualityConfig
from firsttoken.progressiveserve.quality import text_scores
from firsttoken.progressiveserve.quality_gates import Places, column, exp_mean, summarise
from firsttoken.progressiveserve.staging import best_recipe, stage_adapters
from firsttoken.study.errors import AssetError, ProfileError, StageError
from firsttoken.study.profile import Profile
from firsttoken.study.progress import track
from firsttoken.study.stats import bootstrap
from firsttoken.study.summary import Summary
from firsttoken_extras.bitplanes.codec import encode
from firsttoken_extras.bitplanes.encode import STORED, plane_encoder
from firsttoken_extras.bitplanes.first_stage import Bytes, PlanSpec, coarse, coded_bytes
from firsttoken_extras.bitplanes.layouts import SPLITS
from firsttoken_studies.record.results import Outcome, Rows
from firsttoken_studies.stories import story_model

# The largest weights first, to compare with: a mask of one bit a weight, and the values that are kept, coded.
#
# After DLP (Chen et al., Dynamic Layerwise Pruning, ICML 2025) a layer keeps less where its median weight is large, so
# that few stand out; DLP looks at activations too, which nobody has who has only the weights.

NAME, SPREAD = "sparse ", 0.1  # of the shares that layers keep, to either side of their mean


@dataclass(frozen=True)
class Sparse:
    """Keeps as many of the largest weights as come to ``share`` of the plain bytes, mask and values counted."""

    share: float
    waiting, exact = range(0), False  # as a PlanSpec has them

    @classmethod
    def parse(cls, text: str) -> Sparse:
        """Parse a text such as "sparse 0.354". Raises StageError for what is no share."""
        share = text.removeprefix(NAME)
        if not (share.replace(".", "", 1).isdecimal() and 0.1 <= float(share) <= 1):
            raise StageError(f"{text!r} keeps no share of the bytes: write one from 0.1 to 1, such as 'sparse 0.354'")
        return cls(float(share))


@contextmanager
def sparse(model: PreTrainedModel, sparsity: Sparse, dtype: str) -> Iterator[Bytes]:
    """``model`` with its smallest weights 0, stored as ``dtype``, and what it weighs so; as it was after it."""
    exact = {name: parameter.data for name, parameter in model.named_parameters()}
    stored = {name: data.to(STORED[dtype]) for name, data in exact.items()}
    matrices = {name: data for name, data in stored.items() if data.dim() > 1}
    weights = sum(data.numel() for data in matrices.values())
    plain, mask = 2 * sum(data.numel() for data in stored.values()), weights // 8
    cut_bytes = plain - 2 * weights + mask
    every = sum(_coded(data, dtype) for data in matrices.values())
    budget = sparsity.share * plain - cut_bytes
    mean, values = budget / every, 0
    for _ in range(2):  # large weights code better than all do: after one round it is known by how much
        mean *= budget / values if values else 1
        shares, values = _shares(matrices, mean), 0
        for name, data in matrices.items():
            sizes = data.abs().float().flatten()
            least = sizes.kthvalue(max(1, len(sizes) - int(shares[layer_of(name)] * len(sizes)))).values
            stored[name] = torch.where(data.abs() >= least, data, 0)
            values += _coded(data[data.abs() >= least], dtype)
    try:
        for name, parameter in model.named_parameters():
            parameter.data = stored[name].to(parameter.dtype)
        yield Bytes(plain, cut_bytes + values, cut_bytes + every)
    finally:
        for name, parameter in model.named_parameters():
            parameter.data = exact[name]


def _shares(matrices: dict[str, Tensor], mean: float) -> dict[int | None, float]:
    """Return the share that every layer keeps: ``mean`` on average, less where the median weight is a larger part of
    the layer's mean."""
    layers: dict[int | None, list[Tensor]] = {}
    for name, data in matrices.items():
        layers.setdefault(layer_of(name), []).append(data.abs().float().flatten())
    sizes = {layer: torch.cat(magnitudes) for layer, magnitudes in layers.items()}
    medians = {layer: float(size.median() / size.mean()) for layer, size in sizes.items()}
    average = sum(medians[layer] * len(size) for layer, size in sizes.items()) / sum(map(len, sizes.values()))
    widest = max(abs(median - average) for median in medians.values()) or 1.0
    return {
        layer: min(1.0, max(0.0, mean - SPREAD * (layer_median - average) / widest))
        for layer, layer_median in medians.items()
    }


def _coded(data: Tensor, dtype: str) -> int:
    streams = plane_encoder("lossless", dtype).cut(data.cpu().contiguous().flatten().view(torch.int16), 0)
    return sum(len(encode(stream.numpy().tobytes())[1]) for stream in streams)


STORIES = "stories"  # the task of rows that a model of full-precision origin gives
EXACT, PRUNED, HEALED = "s0", "layers", "layers_healed"
SHORT = {"F16": "fp16", "BF16": "bf16"}
SAFETENSORS = {"float16": "F16", "bfloat16": "BF16"}


@dataclass(frozen=True)
class PrecisionConfig:
    """``cuts`` are plans (``bitplanes.first_stage``) with the dtype whose bits they cut, "bits of BF16", or the largest
    weights in a share of the bytes, "sparse 0.354 of BF16"; ``items`` questions and ``windows`` of text score each,
    and, where somebody has brought that model, ``stories`` of ``story_tokens`` tokens of its own those without layers
    that wait.

    ``starts`` cold starts of each of ``start_splits`` over a link of ``gbit_per_s``, ``few_starts`` over each of
    ``few_links`` (Gbit/s; 0 is this disk). What is served is stored as ``stored``.
    """

    cuts: tuple[str, ...]
    items: int
    windows: int
    stories: int
    story_tokens: int
    starts: int
    few_starts: int
    few_links: tuple[float, ...]
    start_splits: tuple[str, ...]
    gbit_per_s: float
    readers: int
    stored: Literal["bfloat16", "float16"]

    def __post_init__(self) -> None:
        exact = {SAFETENSORS[self.stored], *(cut.dtype for cut in self.each() if cut.how.exact)}
        if unknown := next((cut.dtype for cut in self.each() if cut.dtype not in exact), ""):
            raise ProfileError(
                f"precision.cuts: name 'lossless of {unknown}' too, which the others of {unknown} are compared with"
            )
        if self.gbit_per_s in self.few_links:
            raise ProfileError("precision.gbit_per_s and few_links: name every rate once")
        if unknown := next((split for split in self.start_splits if split not in SPLITS), ""):
            raise ProfileError(f"precision.start_splits: no split {unknown!r}; known: {', '.join(SPLITS)}")

    def each(self) -> Iterator[Cut]:
        """Every case. Raises ProfileError for one that is none."""
        for case in self.cuts:
            how, _, dtype = case.rpartition(" of ")
            if dtype not in SHORT:
                raise ProfileError(f"precision.cuts: no cut {case!r}; known: a plan or 'sparse SHARE' of F16 or BF16")
            try:
                yield Cut(variant_name(case), (Sparse if how.startswith(NAME) else PlanSpec).parse(how), dtype)
            except StageError as error:
                raise ProfileError(f"precision.cuts: {error}") from error


class Cut(NamedTuple):
    """A case: what its rows are called, and how weights of ``dtype`` are brought first."""

    variant: str
    how: PlanSpec | Sparse
    dtype: str


def variant_name(case: str) -> str:
    """Return the name of a case in the rows: "bits_bf16"."""
    return re.sub(r"\W+", "_", "{variant} {dtype}".format(**_place(case)))


def _place(case: str) -> dict[str, str]:
    how, _, dtype = case.rpartition(" of ")
    return {"variant": how, "dtype": SHORT[dtype]}


def _places(parameters: Mapping[str, Any]) -> Places:
    healed = QualityConfig.recorded(parameters).recipes[-1]
    layers = {EXACT: {"stage": 0}, PRUNED: {"stage": 1, "recipe": "none"}, HEALED: {"stage": 1, "recipe": healed}}
    return layers | {variant_name(case): _place(case) for case in parameters["precision"]["cuts"]}


def precision_frontier(profile: Profile) -> Outcome:
    """Every case's bytes, answers and perplexity beside those of the exact weights in its dtype, and beside those of
    layers that wait.

    Computed in float32 everywhere, from weights that nothing has rounded: so fp16 and bf16 are both cut from the
    origin, and a result does not hang on what a processor computes in.
    """
    config = profile.section("precision", PrecisionConfig)
    quality = profile.section("quality", QualityConfig)
    sizes = quality.smaller(config.items, config.windows)
    served_config = profile.section("served", ServedConfig)
    check([*served_config.needs(), *sizes.needs()], ModelFacts(profile.model))
    served = load_served(replace(profile, dtype="float32"))
    evaluation = Evaluation(sizes, served.tokenizer)
    rows = _layer_rows(profile, served, evaluation, SAFETENSORS[config.stored])
    exact = {SAFETENSORS[config.stored]: EXACT}
    cuts = sorted(config.each(), key=lambda cut: not cut.how.exact)  # what a dtype's others are compared with first
    for cut in cuts:
        if isinstance(cut.how, PlanSpec):
            cut.how.check(served.plan.depth)  # before an hour is spent
    for name, how, dtype in track(cuts, desc="planes", unit="case"):
        if how.exact and dtype in exact:  # nothing is left out
            size = coded_bytes(served.model, how, dtype)
            answers = [row | {"variant": name} for row in rows if row["variant"] == exact[dtype]]
        else:
            with _first(served.model, how, dtype) as size:
                answers = evaluation.rows(name, served.model)
        rows += _sized(answers, size.first / size.plain, size.planes / size.plain, exact.setdefault(dtype, name))
    story_rows, note = _stories(config, profile.seed)
    return Outcome(rows + story_rows, provenance=served.provenance | {"stories": note})


@contextmanager
def _first(model: PreTrainedModel, how: PlanSpec | Sparse, dtype: str) -> Iterator[Bytes]:
    """Make the first stage of ``model`` within the block, and yield its bytes."""
    if isinstance(how, Sparse):
        with sparse(model, how, dtype) as size:
            yield size
    else:
        size = coded_bytes(model, how, dtype)
        with coarse(model, how, dtype):
            yield size


def _layer_rows(profile: Profile, served: ServedModel, evaluation: Evaluation, stored: str) -> Rows:
    """The exact model in the dtype ``stored``, and the same without the layers that wait, healed and not."""
    share = _share_of_stage_1(served)
    adapter = stage_adapters(profile.section("served", ServedConfig), best_recipe(profile))[1]
    with coarse(served.model, PlanSpec("lossless"), stored) as model:
        rows = _sized(evaluation.rows(EXACT, model), 1.0, 1.0)
        with at_stage(served, 1) as pruned:
            rows += _sized(evaluation.rows(PRUNED, pruned), share, 1.0)
        if adapter.exists():
            with at_stage(served, 1, adapter) as healed:
                rows += _sized(evaluation.rows(HEALED, healed), share, 1.0)
    return rows


def _share_of_stage_1(served: ServedModel) -> float:
    parameters = dict(served.model.named_parameters())
    missing = tuple(f"model.layers.{layer}." for layer in served.plan.missing(1))
    gone = sum(p.numel() for name, p in parameters.items() if name.startswith(missing))
    return 1 - gone / sum(p.numel() for p in parameters.values())


def _sized(rows: Rows, first: float, planes: float, exact: str = EXACT) -> Rows:
    """``rows`` with their bytes before the first token and in all, and the variant that has their exact weights."""
    return [row | {"first_share": first, "planes_share": planes, "exact": exact} for row in rows]


def _stories(config: PrecisionConfig, seed: int) -> tuple[Rows, str]:
    """Rows of the model of full-precision origin on stories that it tells itself, and what is said of them."""
    if not config.stories:
        return [], "not asked for"
    try:
        model = story_model()
    except AssetError as error:
        return [], str(error)
    stories = tell(model, config.stories, config.story_tokens, seed)
    exact = next_tokens(model, stories)
    rows = _story_rows(EXACT, model, stories, exact, 1.0, 1.0)
    for name, how, dtype in config.each():
        if how.waiting:  # these are another model's layers
            continue
        with _first(model, how, dtype) as size:
            rows += _story_rows(name, model, stories, exact, size.first / size.plain, size.planes / size.plain)
    return rows, "llama2.c's 15 M TinyStories checkpoint, float32"


@torch.inference_mode()
def tell(model: PreTrainedModel, count: int, tokens: int, seed: int) -> Tensor:
    """Stories [count, tokens] that ``model`` draws itself after the beginning-of-text token, 1, at temperature 1."""
    draw = torch.Generator().manual_seed(seed)
    story_ids, cache = torch.ones(count, 1, dtype=torch.long), None
    while story_ids.shape[1] < tokens:
        out = model(story_ids[:, -1:] if cache else story_ids, past_key_values=cache, use_cache=True)
        cache, odds = out.past_key_values, out.logits[:, -1].float().softmax(-1)
        story_ids = torch.cat([story_ids, torch.multinomial(odds, 1, generator=draw)], 1)
    return story_ids


@torch.inference_mode()
def next_tokens(model: PreTrainedModel, tokens: Tensor) -> Tensor:
    """The likeliest next token [count, tokens - 1] at every place of ``tokens``."""
    return torch.cat([argmax_tokens(model(part, use_cache=False).logits[:, :-1]) for part in tokens.split(4)])


def _story_rows(name: str, model: PreTrainedModel, tokens: Tensor, exact: Tensor, first: float, planes: float) -> Rows:
    same = (next_tokens(model, tokens) == exact).double().mean(1).tolist()
    scored = zip(text_scores(model, tokens), same, strict=True)
    label = {"variant": name, "task": STORIES}
    return _sized([label | row | {"same_next": share} for row, share in scored], first, planes)


def precision_summary(rows: Rows, parameters: Mapping[str, Any]) -> Summary:
    """Scores, drops, and bytes before the first token by variant; perplexity over the exact weights', paired."""
    question_rows = [row for row in rows if row["task"] != STORIES]
    judged, places, summary = QualityConfig.recorded(parameters).judged, _places(parameters), Summary()
    for exact in dict.fromkeys(row["exact"] for row in question_rows):
        summary += summarise([row for row in question_rows if row["exact"] == exact], places, exact, judged)
    for task, part in (("text", question_rows), (STORIES, [row for row in rows if row["task"] == STORIES])):
        for name in dict.fromkeys(row["variant"] for row in part):
            variant_row = next(row for row in part if row["variant"] == name)
            labels = places[name] | ({"task": task} if task == STORIES else {})
            for measure, share in (("byte_share", "first_share"), ("full_byte_share", "planes_share")):
                summary.add(measure, {"value": variant_row[share], "unit": "of the plain bytes"}, **labels)
            lost = column(part, name, task, "text_nll") - column(part, variant_row["exact"], task, "text_nll")
            summary.add("perplexity_x", bootstrap(lost, exp_mean).summary("x"), **labels, than="exact")
            if task == STORIES:
                same = bootstrap(column(part, name, task, "same_next"))
                summary.add("same_next_pct", same.summary("%", 100), **labels)
    return summary
