"""Which layers wait: how far those that are chosen turn the stream, and what the text costs without them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from firsttoken.assets.corpora import running_text, token_windows
from firsttoken.assets.models import load_model
from firsttoken.progressiveserve.base_model import passing
from firsttoken.progressiveserve.distance import Distances, angular_distances, check_size, choose_block
from firsttoken.progressiveserve.quality import text_scores
from firsttoken.study.errors import StageError
from firsttoken.study.policy_file import PolicyFile, PolicyKind
from firsttoken.study.profile import Profile
from firsttoken_studies.progressiveserve.layers import DistanceConfig
from firsttoken_studies.trying.table import TrialTable, Values, held

Choice = Callable[[Distances, int], Sequence[int]]
PASSAGES = 1  # of each draw: to choose by, and as many others to score


def _fits(answer: Any, distances: Distances, size: int) -> str:
    depth = distances.depth
    listed = isinstance(answer, list | tuple | range) and all(
        type(layer) is int and 0 <= layer < depth for layer in answer
    )
    if listed and len(set(answer)) == len(answer) == size:
        return ""
    return f"must return a list of {size} different layers below {depth}, not {answer!r:.60}"


LAYERS = PolicyKind(
    "choice of layers",
    None,
    "write one function of (distances, size) that returns a list of layers, as "
    "firsttoken.progressiveserve.distance.choose_block does",
    {"": _fits},
)
SIBLINGS: dict[str, Choice] = {
    "least distance, last token": choose_block,
    "least distance, all tokens": lambda distances, size: choose_block(distances, size, "all"),
    "deepest but the last": lambda distances, size: range(distances.depth - 1 - size, distances.depth - 1),
    "none": lambda distances, size: (),
}


def turned(distances: Distances, layers: Sequence[int]) -> float:
    """The mean distance across ``layers``; of several runs of them the sum, which none of the whole exceeds."""
    starts = [layer for layer in layers if layer - 1 not in layers]
    block_ends = [next(end for end in range(start, distances.depth + 1) if end not in layers) for start in starts]
    return sum(float(distances.last_token[:, *span].mean()) for span in zip(starts, block_ends, strict=True))


def tried_layers(path: str, profile: Profile, draws: range) -> TrialTable:
    """Try a policy on the profile's model and pinned text. Raises StageError for a model that reads no text."""
    file, config = PolicyFile.read(Path(path), LAYERS), profile.section("distance", DistanceConfig)
    loaded = load_model(profile.model, dtype=profile.torch_dtype(), device=profile.torch_device())
    if loaded.tokenizer is None:
        raise StageError(f"model {profile.model} has no tokenizer, and layers are tried on text: choose another")
    count = PASSAGES * len(draws)
    chosen_by, scored = (
        token_windows(running_text(split), loaded.tokenizer, config.tokens, count) for split in ("train", "test")
    )
    library_distances = angular_distances(loaded.model, chosen_by, config.batch)
    check_size(library_distances.depth, config.block)

    @torch.inference_mode()
    def one(choice: Choice, draw: int) -> Values:
        passages = slice(PASSAGES * (draw - draws[0]), PASSAGES * (draw - draws[0] + 1))
        distances = Distances(library_distances.last_token[passages], library_distances.all_tokens[passages])
        layers = tuple(choice(distances, config.block))
        with passing(loaded.model, layers) as model:
            losses = [row["text_nll"] for row in text_scores(model, scored[passages])]
        return {"distance, 1 is opposite": turned(distances, layers), "loss, nats/token": sum(losses) / len(losses)}

    setting = (
        f"{config.block} of {library_distances.depth} layers of {profile.model} passed, not healed; a draw chooses by "
        f"one passage of {config.tokens} tokens and is scored on another"
    )
    return TrialTable(setting, held((path, file.watched(), file.judged), SIBLINGS, one, draws))
