"""How many tokens that a stage drafts the whole model keeps, by what had arrived, for chats, code and short answers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any, TypeAlias

import torch
import torch.nn.functional as F
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from firsttoken.assets.corpora import load_qa
from firsttoken.assets.needs import CONTEXT, ModelFacts, Need, check, questions_of
from firsttoken.assets.question_sets import PROBLEMS, code_problems
from firsttoken.engine.sampling import argmax_tokens
from firsttoken.progressiveserve.base_model import ServedConfig, ServedModel, at_stage, load_base, load_served
from firsttoken.progressiveserve.checkpoint.names import layer_of
from firsttoken.progressiveserve.evaluation import QualityConfig
from firsttoken.progressiveserve.quality import PrunedCache
from firsttoken.progressiveserve.samples import STOP, qa_prompt, shortened
from firsttoken.progressiveserve.staging import best_recipe, stage_adapters
from firsttoken.study.errors import ProfileError, StageError
from firsttoken.study.parsing.schema import between
from firsttoken.study.profile import Profile
from firsttoken.study.progress import track
from firsttoken.study.stats import bootstrap
from firsttoken.study.summary import Summary
from firsttoken_extras.bitplanes.first_stage import PlanSpec, coarse, coded_bytes
from firsttoken_studies.record.results import Outcome, Rows

Verify: TypeAlias = Callable[[Sequence[int], Sequence[int]], list[int]]
"""The tokens of a draft, and what the whole model says in the place of each and behind the last -> what is final."""

CHAT, CODE, SHORT, HEALED = "chat", "code", "short answer", "layers, healed"


@dataclass(frozen=True)
class DraftsConfig:
    """``cuts`` are plans of what comes first, as ``bitplanes.first_stage`` spells them. Each drafts up to
    ``chat_tokens`` to ``chats`` questions in the chat template and to the first ``problems`` of HumanEval, and up to
    ``short_tokens`` to ``items`` questions with their passages, ``batch`` at a time."""

    cuts: tuple[str, ...]
    chats: int
    chat_tokens: int
    problems: Annotated[int, between(0, PROBLEMS)]
    items: int
    short_tokens: int
    batch: int

    def __post_init__(self) -> None:
        try:
            self.specs()
        except StageError as error:
            raise ProfileError(f"drafts.cuts: {error}") from error

    def specs(self) -> dict[str, PlanSpec]:
        """The plans by their names."""
        return {cut: PlanSpec.parse(cut) for cut in self.cuts}

    def needs(self, quality: QualityConfig) -> list[Need]:
        """Require as many questions, and a context that holds a prompt and its draft."""
        longest = quality.max_prompt_tokens + max(self.chat_tokens, self.short_tokens)
        return [
            Need("drafts.chats", self.chats, questions_of(quality.closed_book_questions, "test")),
            Need("drafts.items", self.items, questions_of(quality.questions, "test")),
            Need("quality.max_prompt_tokens + drafts.chat_tokens", longest, CONTEXT),
        ]


def longest_prefix(draft: Sequence[int], opinions: Sequence[int]) -> list[int]:
    """Return what is final of ``draft``, where the whole model says ``opinions``, one token more."""
    stays = next((number for number, token in enumerate(draft) if token != opinions[number]), len(draft))
    return [*draft[:stays], opinions[stays]]


def drafts_kept(profile: Profile, *, verify: Verify = longest_prefix) -> Outcome:
    """Every prompt's draft under each cut, and how much of it the whole model keeps, by a reader's ``verify`` or the
    engine's rule. Chats and code are the model's as it is published, short answers those of the model that is
    served."""
    config = profile.section("drafts", DraftsConfig)
    quality = profile.section("quality", QualityConfig)
    served_config = profile.section("served", ServedConfig)
    check([*served_config.needs(), *config.needs(quality)], ModelFacts(profile.model))
    profile = replace(profile, dtype="float32")
    served = load_served(profile)
    base = load_base(profile) if served_config.task_adapter else served
    adapter = stage_adapters(served_config, best_recipe(profile))[1]
    specs, block = config.specs(), served.plan.missing(1)
    every = specs | {HEALED: PlanSpec("lossless", range(block[0], block[-1] + 1))}
    shares = {name: _first_share(served, spec) for name, spec in every.items()}
    rows: Rows = []
    for task, model, count in (
        (CHAT, base, config.chat_tokens),
        (CODE, base, config.chat_tokens),
        (SHORT, served, config.short_tokens),
    ):
        if not (prompts := prompts_of(task, model, config, quality)):
            continue
        with coarse(model.model, PlanSpec("lossless"), "BF16") as full_model:  # what is whole in the end
            drafts: dict[str, list[list[int]]] = {}
            for name in track(every, desc=task, unit="cut"):
                if name == HEALED and not (model is served and adapter.exists()):
                    continue
                arrived = coarse(full_model, specs[name], "BF16") if name in specs else at_stage(model, 1, adapter)
                with arrived as stage:
                    drafts[name] = answers_of(stage, model.tokenizer, task, prompts, count, config.batch)
            for number, prompt in enumerate(track(prompts, desc=f"{task}, verified", unit="prompt")):
                by_cut = {name: drafted[number] for name, drafted in drafts.items()}
                for (name, draft), opinions in zip(
                    by_cut.items(), opinions_of(full_model, prompt, by_cut.values()), strict=True
                ):
                    same = sum(a == b for a, b in zip(draft, opinions, strict=False))
                    counts = {"drafted": len(draft), "kept": len(verify(draft, opinions)) - 1, "same": same}
                    rows.append({"variant": name, "task": task, "prompt": number, "first_share": shares[name]} | counts)
    return Outcome(rows, provenance=served.provenance)


def answers_of(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    task: str,
    prompts: Sequence[list[int]],
    count: int,
    batch: int,
) -> list[list[int]]:
    """Return what ``model`` says to each of ``prompts``: up to ``count`` tokens or its end.

    It reads ``batch`` at a time, by length, so that little of what it reads fills up a shorter prompt.
    """
    by_length = sorted(range(len(prompts)), key=lambda number: len(prompts[number]))
    answers: dict[int, list[int]] = {}
    for first in range(0, len(by_length), batch):
        numbers = by_length[first : first + batch]
        answers.update(zip(numbers, greedy(model, [prompts[number] for number in numbers], count), strict=True))
    return [_to_the_end(answers[number], tokenizer, task) for number in range(len(prompts))]


def _to_the_end(tokens: list[int], tokenizer: PreTrainedTokenizerBase, task: str) -> list[int]:
    """The draft up to its end: the model's own, and of a short answer that of the line."""
    for number, token in enumerate(tokens, start=1):
        if token == tokenizer.eos_token_id or (task == SHORT and STOP in tokenizer.decode([token])):
            return tokens[:number]
    return tokens


def prompts_of(task: str, served: ServedModel, config: DraftsConfig, quality: QualityConfig) -> list[list[int]]:
    """The tokens of the prompts of a ``task``. Of one longer than the quality studies take the passage loses its
    beginning."""
    tokenizer = served.tokenizer
    if task == CODE:
        return [tokenizer.encode(text) for text in (code_problems()[: config.problems] if config.problems else ())]
    if task == CHAT:
        questions = [item.question for item in load_qa(quality.closed_book_questions, "test")[: config.chats]]
        return [chat_prompt(tokenizer, question) for question in questions]
    items = load_qa(quality.questions, "test")[: config.items]
    encoded = (tokenizer.encode(qa_prompt(item.passage, item.question)) for item in items)
    return [shortened(ids, tokenizer, quality.max_prompt_tokens) for ids in encoded]


def chat_prompt(tokenizer: PreTrainedTokenizerBase, question: str) -> list[int]:
    """The tokens of ``question`` as a user's turn, or, of a model without turns, as a question of a book."""
    if not tokenizer.chat_template:
        return tokenizer.encode(qa_prompt("", question))
    turn = [{"role": "user", "content": question}]
    text = tokenizer.apply_chat_template(turn, add_generation_prompt=True, tokenize=False)
    return tokenizer.encode(text, add_special_tokens=False)


def _first_share(served: ServedModel, spec: PlanSpec) -> float:
    """The share of the plain bytes that come before the first token; layers that wait leave the others plain."""
    if spec.split != "lossless":
        size = coded_bytes(served.model, spec, "BF16")
        return size.first / size.plain
    counts = [(layer_of(name), parameter.numel()) for name, parameter in served.model.named_parameters()]
    return sum(count for layer, count in counts if layer not in spec.waiting) / sum(count for _, count in counts)


@torch.inference_mode()
def greedy(model: PreTrainedModel, prompts: Sequence[list[int]], count: int) -> list[list[int]]:
    """The ``count`` tokens that ``model`` says to each of ``prompts``."""
    width = max(map(len, prompts))
    ids = torch.tensor([[0] * (width - len(prompt)) + prompt for prompt in prompts], device=model.device)
    mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts], device=model.device)
    cache, taken = PrunedCache(), []
    while len(taken) < count:
        positions = (mask.cumsum(1) - 1).clamp(min=0)[:, -ids.shape[1] :]
        options = {"attention_mask": mask, "position_ids": positions, "past_key_values": cache, "use_cache": True}
        ids = argmax_tokens(model(ids, logits_to_keep=1, **options).logits[:, -1])[:, None]
        mask = F.pad(mask, (0, 1), value=1)
        taken.append(ids)
    return torch.cat(taken, 1).tolist()


@torch.inference_mode()
def opinions_of(model: PreTrainedModel, prompt: Sequence[int], drafts: Iterable[Sequence[int]]) -> list[list[int]]:
    """Return what ``model`` says in the place of each token of each of ``drafts`` and behind its last.

    The prompt is read once, and each draft in one prefill behind it.
    """
    cache, opinions = PrunedCache(), []
    options = {"past_key_values": cache, "use_cache": True}
    first = argmax_tokens(model(torch.tensor([prompt]), logits_to_keep=1, **options).logits[0])
    for draft in drafts:
        logits = model(torch.tensor([list(draft)]), **options).logits[0]
        opinions.append([*first.tolist(), *argmax_tokens(logits).tolist()])
        cache.crop(-len(draft))
    return opinions


def drafts_summary(rows: Rows, parameters: Mapping[str, Any]) -> Summary:
    """Summarize by cut and task the tokens kept, and the share of what was drafted."""
    summary = Summary()
    for task, name in dict.fromkeys((row["task"], row["variant"]) for row in rows):
        chosen = [row for row in rows if (row["task"], row["variant"]) == (task, name)]
        labels = {"variant": name, "task": task}
        summary.add("byte_share", {"value": chosen[0]["first_share"], "unit": "of the plain bytes"}, **labels)
        summary.add("kept", bootstrap([row["kept"] for row in chosen]).summary("tokens"), **labels)
        for measure, column in (("kept_pct", "kept"), ("same_pct", "same")):
            shares = [100 * row[column] / row["drafted"] for row in chosen]
            summary.add(measure, bootstrap(shares).summary("% of a draft"), **labels)
    return summary
