"""What the first server of a chain can read of a prompt: tokens found from hidden states, by layers that stay local.

Two attacks by whoever knows the model: the nearest embedding, and a linear map to embeddings, learnt from public text.
A better attack finds more: what is measured is what is lost at least.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from firsttoken.assets.corpora import running_text, token_windows
from firsttoken.assets.decoder_layers import layers_of
from firsttoken.assets.models import load_model
from firsttoken.assets.needs import CONTEXT, LAYERS, ModelFacts, Need, check, text_of
from firsttoken.study.errors import ProfileError
from firsttoken.study.profile import Profile
from firsttoken.study.progress import track
from firsttoken.study.summary import Summary
from firsttoken_studies.record.results import Outcome, Rows, frame_of, rows_where

NEAREST, LINEAR, GUESS = "nearest embedding", "linear probe", "the commonest token"
RIDGE = 1e-4  # of the mean square of a feature
_BYTES = 2  # of a parameter, as models are stored


@dataclass(frozen=True)
class PrivacyConfig:
    """States that enter each of the layers ``depths`` (as many are local), of ``windows`` windows of ``window_tokens``
    held-out tokens; the linear map learns from ``train_windows`` others. ``batch`` go through the model at once.
    ProfileError for no depth, or none to begin with."""

    depths: tuple[int, ...]
    train_windows: int
    windows: int
    window_tokens: int
    batch: int

    def __post_init__(self) -> None:
        if (
            min(self.train_windows, self.windows, self.window_tokens, self.batch) < 1
            or min(self.depths, default=-1) < 0
        ):
            raise ProfileError("privacy: depths are 0 or more, and every other number at least 1")

    def needs(self) -> list[Need]:
        """Require a model with a layer that each depth enters, and the context, and texts with the windows."""
        return [
            Need("privacy.depths + 1", max(self.depths) + 1, LAYERS),
            Need("privacy.window_tokens", self.window_tokens, CONTEXT),
            Need("privacy.train_windows x window_tokens", self.train_windows * self.window_tokens, text_of("train")),
            Need("privacy.windows x window_tokens", self.windows * self.window_tokens, text_of("test")),
        ]


def as_computed(states: Tensor) -> Tensor:
    """Return what a client sends to the first server: the ``states`` [tokens, hidden] of its own layers."""
    return states


def ridge(squares: Tensor, products: Tensor) -> Tensor:
    """Return the linear map of a ridge regression from the sums of its features' ``squares`` [width, width] and of
    their ``products`` [width, hidden] with what is looked for."""
    much = RIDGE * squares.diagonal().mean()
    return torch.linalg.solve(squares + much * torch.eye(len(squares), device=squares.device), products)


def swarm_privacy(
    profile: Profile,
    *,
    sent: Callable[[Tensor], Tensor] = as_computed,
    attack: Callable[[Tensor, Tensor], Tensor] = ridge,
) -> Outcome:
    """Rows {depth, attack, window, tokens, recovered}, recovered a share, and {depth, local_bytes}; float32.

    The client may change what is ``sent``, of which the attacker knows; its linear map is learnt by ``attack``.
    """
    config = profile.section("privacy", PrivacyConfig)
    check(config.needs(), ModelFacts(profile.model))
    device = profile.torch_device()
    loaded = load_model(profile.model, device=device)
    model, split = loaded.model, {}
    for name, count in (("train", config.train_windows), ("test", config.windows)):
        split[name] = token_windows(running_text(name), loaded.tokenizer, config.window_tokens, count).to(device)
    layer = sum(parameter.numel() for parameter in layers_of(model)[0].parameters())
    rows: Rows = [{"depth": depth, "local_bytes": depth * layer * _BYTES} for depth in config.depths]
    embeddings = nn.functional.normalize(model.get_input_embeddings().weight.detach(), dim=1)
    probes = _learnt(model, split["train"], embeddings, config, sent, attack)
    commonest = Counter(split["train"].flatten().tolist()).most_common(1)[0][0]
    hidden_states = _entering(model, split["test"], config, sent)
    for first, (ids, states) in zip(range(0, config.windows, config.batch), hidden_states, strict=True):
        guesses = {(0, GUESS): torch.full_like(ids, commonest)}
        for depth, rows_in in states.items():
            guesses[depth, NEAREST] = _nearest(rows_in, embeddings)
            guesses[depth, LINEAR] = _nearest(_features(rows_in) @ probes[depth], embeddings)
        for (depth, name), guessed in guesses.items():
            shares = (guessed == ids).float().mean(1).tolist()
            labels = {"depth": depth, "attack": name, "tokens": config.window_tokens}
            rows += [{**labels, "window": first + window, "recovered": share} for window, share in enumerate(shares)]
    return Outcome(rows, provenance=loaded.provenance.as_dict())


@torch.inference_mode()
def _entering(
    model: nn.Module, windows: Tensor, config: PrivacyConfig, sent: Callable[[Tensor], Tensor] = as_computed
) -> Iterator[tuple[Tensor, dict[int, Tensor]]]:
    """Yield each batch of ``windows`` [batch, tokens], and by depth what is ``sent`` of the hidden states that enter
    that layer [batch, tokens, hidden]."""
    body, states = model.model, {}
    every, body.layers = body.layers, body.layers[: max(config.depths) + 1]

    def keep(depth: int) -> Any:
        return lambda _, args: states.update({depth: args[0]})

    hooks = [every[depth].register_forward_pre_hook(keep(depth)) for depth in config.depths]
    try:
        for ids in track(windows.split(config.batch), desc="states"):
            body(ids, use_cache=False)
            yield ids, {depth: torch.stack([sent(row) for row in rows]) for depth, rows in states.items()}
    finally:
        body.layers = every
        for hook in hooks:
            hook.remove()


@torch.inference_mode()
def _learnt(
    model: nn.Module,
    windows: Tensor,
    embeddings: Tensor,
    config: PrivacyConfig,
    sent: Callable[[Tensor], Tensor] = as_computed,
    attack: Callable[[Tensor, Tensor], Tensor] = ridge,
) -> dict[int, Tensor]:
    """Fit by depth a linear map from what is ``sent`` to the ``embeddings`` [vocabulary, hidden] of its tokens."""
    width = embeddings.shape[1] + 1
    squares = {depth: embeddings.new_zeros(width, width) for depth in config.depths}
    products = {depth: embeddings.new_zeros(width, width - 1) for depth in config.depths}
    for ids, states in _entering(model, windows, config, sent):
        wanted = embeddings[ids.flatten()]
        for depth, rows in states.items():
            features = _features(rows).flatten(0, 1)
            squares[depth] += features.T @ features
            products[depth] += features.T @ wanted
    return {depth: attack(squares[depth], products[depth]) for depth in config.depths}


def _features(states: Tensor) -> Tensor:
    """``states`` [..., hidden] of one size each, and a 1: a few tokens' are a hundred times as large as the others'."""
    sized = states / states.pow(2).mean(-1, keepdim=True).sqrt().clamp_min(1e-12)
    return torch.cat([sized, torch.ones_like(sized[..., :1])], -1)


def _nearest(states: Tensor, embeddings: Tensor) -> Tensor:
    """The tokens [batch, tokens] whose embeddings point most as ``states`` [batch, tokens, hidden] do."""
    return torch.stack([(state @ embeddings.T).argmax(-1) for state in states])


def privacy_summary(rows: Rows, parameters: Mapping[str, Any]) -> Summary:
    """Per cent of the tokens that each attack recovers behind each number of local layers, drawn by window."""
    summary, recovered = Summary(), {"recovered_pct": ("recovered", "mean", "%", 100)}
    summary.by(frame_of(rows, attack=GUESS), {}, recovered, variant=GUESS)
    for depth in parameters["privacy"]["depths"]:
        for attack in (NEAREST, LINEAR):
            summary.by(frame_of(rows, depth=depth, attack=attack), {}, recovered, variant=attack, layers=depth)
        (local_bytes,) = [row["local_bytes"] for row in rows_where(rows, depth=depth) if "local_bytes" in row]
        summary.add("weights_mb", {"value": local_bytes / 1e6, "unit": "MB"}, layers=depth)
    return summary
