"""Which layers a model computes again over the cache of another: profiled once for a pair, and kept beside the caches.

The items need nobody's answers: what is asked is whether the receiver goes on as it would over its own cache.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from math import comb
from pathlib import Path
from typing import Annotated, Literal

import torch
from torch import Tensor
from transformers import PreTrainedModel

from firsttoken.droidspeak.forward import Forward, cache_of
from firsttoken.droidspeak.identity import ModelIdentity, check_compatible
from firsttoken.droidspeak.layer_group import Group
from firsttoken.droidspeak.prefix import Prefix
from firsttoken.droidspeak.profile.layer_profiler import LayerProfiler, Questions
from firsttoken.droidspeak.profile.pareto import Profiled, smallest_within
from firsttoken.engine.sampling import argmax_tokens
from firsttoken.study.errors import FirstTokenError, RequestError
from firsttoken.study.files import write_text
from firsttoken.study.parsing.json_text import read_json
from firsttoken.study.parsing.schema import at_least, between, parse_as
from firsttoken.study.progress import track

SUFFIX, CONTINUATION = 8, 24  # tokens of an item behind its prefix: given ones, and those that the receiver then says
BOUNDARIES = 10  # about as many layers apart are the ends of the groups that are tried
_MOST_BYTES = 1 << 16
_NAME = re.compile(r"([0-9a-f]{16})-([0-9a-f]{16})\.pair\.json")


@dataclass(frozen=True)
class PairProfile:
    """Layers [``lo``, ``hi``) of ``layers`` are computed again by the receiver, as that loses at most ``bound``.

    ``loss`` is the share of the tokens of ``items`` continuations that then differ from those over its own cache,
    ``reused`` the same where nothing is computed again. ``tokens`` is the length of the prefixes that were tried.
    """

    layers: Annotated[int, at_least(1)]
    lo: Annotated[int, at_least(0)]
    hi: Annotated[int, at_least(0)]
    loss: Annotated[float, between(-1, 1)]
    reused: Annotated[float, between(-1, 1)]
    bound: Annotated[float, between(0, 1)]
    items: Annotated[int, at_least(1)]
    tokens: Annotated[int, at_least(1)]
    format: Literal["firsttoken-pair-1"] = "firsttoken-pair-1"

    @property
    def group(self) -> Group:
        """The layers that are computed again."""
        return Group(self.lo, self.hi)

    def __str__(self) -> str:
        layers_text = f"layers {self.group}" if len(self.group) else "no layer"
        return (
            f"{layers_text} of {self.layers} computed again: {100 * self.loss:.1f} % of the tokens differ "
            f"({100 * self.reused:.1f} % where all is reused; {self.items} texts)"
        )


@torch.inference_mode()
def profile_pair(
    sender: PreTrainedModel, receiver: PreTrainedModel, rows: Sequence[Sequence[int]], bound: float
) -> PairProfile:
    """The fewest layers within ``bound``, by ``rows`` of token ids of one length, of which the last ``SUFFIX`` follow
    the prefix. Raises RequestError for rows that are too short, or of several lengths."""
    lengths = {len(row) for row in rows}
    if len(lengths) != 1 or min(lengths) <= SUFFIX:
        raise RequestError(f"a pair is profiled by texts of one length above {SUFFIX} tokens, not of {sorted(lengths)}")
    ids = torch.tensor([list(row) for row in rows], device=receiver.device)
    prefix, given = Prefix(ids[:, :-SUFFIX]), ids[:, -SUFFIX:]
    depth = receiver.config.num_hidden_layers
    edges = sorted({*range(0, depth, -(-depth // BOUNDARIES)), depth})
    with track(
        desc=f"{len(rows)} texts of {ids.shape[1]} tokens", total=1 + comb(len(edges), 2), unit="layer group"
    ) as bar:
        with_continuation = torch.cat([given, _continued(receiver, ids)], 1)
        predicts = torch.zeros_like(with_continuation, dtype=torch.bool)
        predicts[:, SUFFIX - 1 : -1] = True
        questions = Questions(prefix, with_continuation, torch.ones_like(with_continuation), predicts)
        profiler = LayerProfiler(sender, receiver, questions, edges[:-1])
        own_accuracy, tried = tuple(profiler.prefill().accuracy.tolist()), {}
        for group, score in profiler.groups(edges):
            tried[group] = Profiled(group, own_accuracy, tuple(score.accuracy.tolist()))
            bar.update()
    best = smallest_within(list(tried.values()), bound, absolute=True)
    reused = tried[Group(0, 0)].absolute_loss
    return PairProfile(depth, best.group.lo, best.group.hi, best.absolute_loss, reused, bound, len(rows), prefix.tokens)


def _continued(model: PreTrainedModel, ids: Tensor) -> Tensor:
    """The most likely ``CONTINUATION`` tokens [rows, CONTINUATION] behind ``ids`` [rows, tokens]."""
    cache, new = cache_of([None] * model.config.num_hidden_layers), ids.shape[1]
    for _ in range(CONTINUATION):
        forward = Forward(model, Prefix(ids), new=new)
        hidden = forward.run(forward.embed(), range(forward.depth), cache)
        ids, new = torch.cat([ids, argmax_tokens(forward.logits(hidden[:, -1:]))], 1), 1
    return ids[:, -CONTINUATION:]


def write_profile(folder: Path, sender: ModelIdentity, receiver: ModelIdentity, profile: PairProfile) -> Path:
    """Write what was found of the pair beside the caches in ``folder``; owners make no difference to it. Returns the
    file. Raises CacheError when the two do not fit, and OSError."""
    check_compatible(sender.anybody, receiver.anybody)
    file = folder / f"{sender.anybody.key}-{receiver.anybody.key}.pair.json"
    write_text(file, json.dumps(asdict(profile), indent=1) + "\n")
    return file


def read_profiles(folder: Path) -> dict[tuple[str, str], PairProfile]:
    """Return the profiles in ``folder``, by the keys of sender and receiver, without files that cannot be read."""
    profiles = {}
    for file in sorted(folder.glob("*.pair.json")):
        if match := _NAME.fullmatch(file.name):
            with suppress(OSError, ValueError, FirstTokenError):
                profile = parse_as(PairProfile, read_json(file, _MOST_BYTES))
                profile.group.check(profile.layers)
                profiles[match.group(1), match.group(2)] = profile
    return profiles
