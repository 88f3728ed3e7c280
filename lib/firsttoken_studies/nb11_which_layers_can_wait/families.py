"""Three families of models asked the same: which block of layers may wait, 8 bits, and the bits that come first.

Everything else that this project says of quality it says of one model of 135 million weights. Each model here is
rounded to bfloat16 first, and nothing is healed: what a pruned model loses is what is lost before any training.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Annotated, Any

import numpy as np
import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from firsttoken.assets.corpora import running_text, token_windows
from firsttoken.assets.decoder_layers import layers_of
from firsttoken.assets.models import Loaded, as_stored, load_model
from firsttoken.assets.needs import CONTEXT, ModelFacts, Need, check, text_of
from firsttoken.engine.linear8 import UNROUNDED, to_8_bits
from firsttoken.progressiveserve.base_model import passing
from firsttoken.progressiveserve.distance import angular_distances, choose_block
from firsttoken.progressiveserve.quality import text_scores
from firsttoken.study.errors import StageError
from firsttoken.study.parsing.schema import between, non_empty
from firsttoken.study.profile import Profile
from firsttoken.study.progress import track
from firsttoken.study.stats import bootstrap
from firsttoken.study.summary import Summary
from firsttoken_extras.bitplanes.first_stage import PlanSpec, coarse
from firsttoken_studies.choice_tasks import TASKS
from firsttoken_studies.multiple_choice import ChoiceTasksConfig, accuracy_summary
from firsttoken_studies.progressiveserve.layers import BlockRule, chosen, last_tokens
from firsttoken_studies.record.overlay import over
from firsttoken_studies.record.results import Outcome, Result, Rows, Table, frame_of, rows_where
from firsttoken_studies.record.show import interval

WHOLE, BY_DISTANCE, BY_LOSS = "whole", "without_block_by_distance", "without_block_by_loss"
FIRST_BITS, EIGHT = "first_bits", "8_bits"
ANSWERING = (WHOLE, BY_LOSS, EIGHT)  # the variants that are asked the tasks; the others are scored on text alone
NAMES = {
    BY_DISTANCE: "without the block of the least distance",
    BY_LOSS: "without the block of the least loss",
    FIRST_BITS: "first bits alone",
    EIGHT: "weights in 8 bits",
}


@dataclass(frozen=True)
class FamiliesConfig(ChoiceTasksConfig):
    """``models``, as ``load_model`` names them, and the tasks.

    ``waiting_pct`` of the layers wait, rounded to a whole number: the block of the least angular distance over
    ``passages`` windows of training text, and the one without which the first ``tried`` of them have the least loss.
    Perplexity is over ``windows`` of held-out text; every window has ``window_tokens``. ``first`` names the plan of the
    bits that come first.
    """

    models: Annotated[tuple[str, ...], non_empty]
    waiting_pct: Annotated[int, between(1, 99)]
    passages: int
    tried: Annotated[int, between(1, 1 << 10)]
    windows: int
    window_tokens: int
    first: str

    def needs(self) -> list[Need]:
        """Require texts that hold the windows, and a model that holds a window."""
        return [
            Need("families.passages x window_tokens", self.passages * self.window_tokens, text_of("train")),
            Need("families.windows x window_tokens", self.windows * self.window_tokens, text_of("test")),
            Need("families.window_tokens", self.window_tokens, CONTEXT),
        ]

    def waiting(self, model: PreTrainedModel) -> int:
        """Return the number of layers of ``model`` that wait."""
        return max(1, round(len(layers_of(model)) * self.waiting_pct / 100))

    def calibration(self, tokenizer: PreTrainedTokenizerBase) -> torch.Tensor:
        """The windows [passages, window_tokens] of training text on which a block is chosen."""
        return token_windows(running_text("train"), tokenizer, self.window_tokens, self.passages)


def families(profile: Profile, *, rule: BlockRule | None = None) -> Outcome:
    """Rows of each model, {model, what: block, start, size, distance, text_nll} and {model, what: text, variant,
    window, text_nll}, and the answers as ``ChoiceTasksConfig`` has them. A reader's ``rule`` chooses the block of the
    least distance in place of the library's. Raises AssetError for a model that is not fetched."""
    config = profile.section("families", FamiliesConfig)
    rows, origins = config.right(), {}
    for name in config.models:
        check(config.needs(), ModelFacts(name))
    for name in track(config.models, desc="families"):
        loaded = load_model(name, dtype=profile.torch_dtype(), device=profile.torch_device())
        if loaded.tokenizer is None:
            raise StageError(f"model {name} has no tokenizer, and its quality is judged on text: choose another")
        as_stored(loaded.model, torch.bfloat16, profile.torch_dtype())
        origins[name] = loaded.provenance.as_dict()
        rows += [{"model": name} | row for row in _family(config, loaded, rule)]
    return Outcome(rows, provenance=origins[config.models[0]] | {"families": origins})


@torch.inference_mode()
def _family(config: FamiliesConfig, loaded: Loaded, rule: BlockRule | None) -> Rows:
    model, size, calibration = loaded.model, config.waiting(loaded.model), config.calibration(loaded.tokenizer)
    held_out = token_windows(running_text("test"), loaded.tokenizer, config.window_tokens, config.windows)
    if rule is None:
        distances = angular_distances(model, calibration, config.batch)
        block, turned = choose_block(distances, size), distances.block(size).mean(0)
    else:
        block, turned = rule(last_tokens(model, calibration, config.batch), size)
    rows: Rows = []
    for start, distance in enumerate(track(turned.tolist(), desc="blocks", leave=False)):
        with passing(model, tuple(range(start, start + size))):
            losses = [row["text_nll"] for row in text_scores(model, calibration[: config.tried], config.batch)]
        loss = float(np.mean(losses))
        rows.append({"what": "block", "start": start, "size": size, "distance": distance, "text_nll": loss})
    rows[block[0]]["left_out"] = True
    least = min(rows, key=lambda row: row["text_nll"])["start"]
    variants: dict[str, AbstractContextManager[Any]] = {
        WHOLE: nullcontext(),
        BY_DISTANCE: passing(model, tuple(block)),
        BY_LOSS: passing(model, tuple(range(least, least + size))),
        FIRST_BITS: coarse(model, PlanSpec.parse(config.first), "BF16"),
        EIGHT: _in_8_bits(model),  # the last, as it stays so
    }
    for variant, made in variants.items():
        with made:
            scored = text_scores(model, held_out, config.batch)
            losses = [{"window": window, "text_nll": row["text_nll"]} for window, row in enumerate(scored)]
            rows += [{"what": "text", "variant": variant} | row for row in losses]
            rows += config.chosen(variant, model, loaded.tokenizer) if variant in ANSWERING else []
    return rows


@contextmanager
def _in_8_bits(model: PreTrainedModel) -> Iterator[None]:
    """The layers' weights in 8 bits, their inputs as they are."""
    to_8_bits(layers_of(model), UNROUNDED)
    yield


def families_summary(rows: Rows, parameters: Mapping[str, Any]) -> Summary:
    """Perplexity of each model, what its variants lose of it in %, paired by window, both blocks, and accuracy."""
    summary = Summary()
    for model in parameters["families"]["models"]:
        blocks, text = frame_of(rows, what="block", model=model), frame_of(rows, what="text", model=model)
        least = {BY_DISTANCE: chosen(rows_where(rows, what="block", model=model))["start"]}
        least[BY_LOSS] = int(blocks.start[blocks.text_nll.idxmin()])
        for variant, start in least.items():
            summary.add("chosen_start", {"value": start, "unit": "layer, 0-based"}, model=model, variant=variant)
        losses = {name: windows.text_nll.to_numpy() for name, windows in text.groupby("variant", sort=False)}
        plain = losses.pop(WHOLE)
        perplexity = bootstrap(plain, lambda sample: float(np.exp(sample.mean())))
        summary.add("perplexity", perplexity.summary(), model=model, variant=WHOLE)
        for name, variant_losses in losses.items():
            lost = bootstrap(variant_losses - plain, lambda sample: float(100 * np.expm1(sample.mean())))
            summary.add("perplexity_lost_pct", lost.summary("%"), model=model, variant=name, than=WHOLE)
        places = {name: {"model": model, "variant": name, "than": WHOLE} for name in ANSWERING}
        answers = [row for row in rows if "right" in row] + rows_where(rows, model=model)
        summary += accuracy_summary(answers, places | {WHOLE: {"model": model, "variant": WHOLE}}, WHOLE)
    return summary


def family_rows(recorded: Result | None, now: Result) -> Table:
    """A row for each model and variant: the layers that wait, perplexity or what is lost of it, and the points of
    accuracy lost or gained by task."""
    for shown in over(recorded, now):
        summary, config = shown.result.summary, shown.result.parameters["families"]
        sizes = {row["model"]: row["size"] for row in shown.result.rows if row.get("what") == "block"}
        for model in config["models"]:
            row = {"model": model, "variant": "whole, in bf16", "waits": ""}
            row["perplexity"] = interval(summary.of("perplexity", model=model, variant=WHOLE), 1)
            for task in (task.split()[0] for task in config["tasks"]):
                whole_accuracy = summary.of("accuracy_pct", model=model, variant=WHOLE, task=task)
                row[f"{TASKS[task].title}, %"] = interval(whole_accuracy, 0)
            yield row | {"whose": shown.who()}
            for variant, label in NAMES.items():
                labels = {"model": model, "variant": variant}
                start = summary.get("chosen_start", **labels)
                row = {"model": model, "variant": label, "waits": ""}
                if start is not None:
                    row["waits"] = f"{start['value']} to {start['value'] + sizes[model] - 1}"
                lost = summary.of("perplexity_lost_pct", **labels, than=WHOLE)
                row["perplexity"] = f"{interval(lost, 2 if variant == EIGHT else 0)} % more"
                for task in (task.split()[0] for task in config["tasks"]):
                    change = summary.get("accuracy_change", **labels, than=WHOLE, task=task)
                    row[f"{TASKS[task].title}, %"] = "" if change is None else f"{interval(change, 1)} points"
                yield row | {"whose": shown.who()}
