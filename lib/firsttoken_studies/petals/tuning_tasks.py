"""What clients learn where training is studied, through servers and by stock PEFT, from one start."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F
from peft import PeftModel
from torch import Tensor, nn
from transformers import PretrainedConfig

from firsttoken.assets import corpora
from firsttoken.assets.layers import layers_of
from firsttoken.assets.models import Loaded
from firsttoken.assets.quiet import quiet_transformers
from firsttoken.petals.tuning.adapters import Lora, SoftPrompt
from firsttoken.study.clock import Stopwatch

LORA, PROMPT, HEAD = "lora", "prompt", "head"
RATES = {LORA: 2e-3, PROMPT: 2e-2}
"""Adam's rates, of what is trained for several steps: LoRA on passages, a soft prompt on questions."""

_LORA = "base_model.model.model.layers.{}.{}.lora_{}.default.weight"
Trained = SoftPrompt | Lora


class TunedStep(NamedTuple):
    """The loss before a step of training, in nats a token, and the seconds of all of it."""

    loss: float
    seconds: float


def windows(loaded: Loaded, rows: int, tokens: int) -> dict[str, Tensor]:
    """``rows`` of ``tokens`` tokens of passages for LoRA, of questions for a prompt."""
    texts = {LORA: corpora.running_text("train"), PROMPT: [asked for _, asked in corpora.boolq_prompts("train")]}
    return {kind: corpora.token_windows(text, loaded.tokenizer, tokens, rows) for kind, text in texts.items()}


def start(kind: str, config: PretrainedConfig, prompt_tokens: int, rank: int) -> Trained:
    """What is trained, as it begins: the same each time."""
    return SoftPrompt(config, prompt_tokens) if kind == PROMPT else Lora(config, rank, 2.0 * rank)


def nothing(_: int) -> None:
    """What is done between the passes of an undisturbed step."""


def learn(
    loss: Callable[[], Tensor],
    parameters: list[nn.Parameter],
    rate: float,
    steps: int,
    between: Callable[[int], None] = nothing,
) -> list[TunedStep]:
    """``steps`` of Adam; ``between`` is called with each one's number after its forward pass."""
    optimiser, said = torch.optim.Adam(parameters, rate), []
    for step in range(steps):
        with Stopwatch() as watch:
            optimiser.zero_grad()
            found = loss()
            between(step)
            found.backward()
            optimiser.step()
        said.append(TunedStep(float(found.detach()), watch.seconds))
    return said


@contextmanager
def stock(model: nn.Module, folder: Path) -> Iterator[PeftModel]:
    """``model`` with what PEFT reads from ``folder``, to be trained; ``model`` alone again afterwards."""
    with quiet_transformers():
        peft = PeftModel.from_pretrained(model, str(folder))
    for name, one in peft.named_parameters():  # PEFT's own switch is for all but prompts
        one.requires_grad_("lora_" in name or "prompt" in name)
    try:
        yield peft
    finally:
        if not peft.active_peft_config.is_prompt_learning:  # a prompt leaves the model alone
            peft.unload()


def stock_loss(peft: PeftModel, ids: Tensor) -> Tensor:
    """The mean over the next tokens of ``ids`` [rows, tokens]."""
    logits = peft(input_ids=ids).logits[:, -ids.shape[1] :]
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


def stock_parameters(peft: PeftModel) -> list[nn.Parameter]:
    """What is trained."""
    return [one for one in peft.parameters() if one.requires_grad]


def block_share(model: nn.Module) -> float:
    """Of a forward pass's products, those of the blocks: the rest is the head's."""
    blocks = sum(one.numel() for layer in layers_of(model) for one in layer.parameters())
    return blocks / (blocks + model.lm_head.weight.numel())


def head_loss(hidden: Tensor, head: nn.Linear) -> Tensor:
    """Of a head that tells from the last of ``hidden`` [rows, tokens, hidden] whether a row is of the second half."""
    labels = torch.arange(len(hidden)) >= len(hidden) // 2
    return F.cross_entropy(head(hidden[:, -1]), labels.long())


def gradients(trained: Trained) -> dict[str, Tensor]:
    """By the names of ``stock_gradients``."""
    if isinstance(trained, SoftPrompt):
        return {PROMPT: trained.weight.grad}
    return {
        _LORA.format(layer, name, half): one.grad
        for (layer, name), halves in trained.adapters().items()
        for half, one in zip("AB", halves, strict=True)
    }


def stock_gradients(peft: PeftModel) -> dict[str, Tensor]:
    """Of what is trained, by its name within PEFT's model; of a prompt by PROMPT."""
    found = {name: one.grad for name, one in peft.named_parameters() if one.requires_grad}
    return {PROMPT: next(iter(found.values()))} if len(found) == 1 else found
