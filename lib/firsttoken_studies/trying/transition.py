"""What an open session does again when layers appear: eight random layers, of which three come later."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import torch

from firsttoken.assets.models import load_model
from firsttoken.engine.live_executor import LiveExecutor
from firsttoken.progressiveserve.loading.views import StageView, make_view
from firsttoken.progressiveserve.passlayer import PassLayer
from firsttoken.progressiveserve.staged_serving.stage_versions import StagedModelVersion
from firsttoken.progressiveserve.staged_serving.transitions import TRANSITIONS, Transition
from firsttoken.study.policy_file import PolicyFile, PolicyKind
from firsttoken.study.profile import Profile
from firsttoken_studies.progressiveserve.probe import Probe
from firsttoken_studies.trying.table import TrialTable, Values, held

DEPTH, MISSING = 8, ((3, 4, 5), (5,), ())  # by stage
MOVES = ((1, 2), (2, 3), (1, 3))
TOKENS, STEPS = 256, 12  # of a session when it moves, and looked at afterwards


def _kept(answer: Any, policy: Transition, view: StageView) -> str:
    fits = isinstance(answer, tuple) and all(
        isinstance(layer, int) and 0 <= layer < len(view.layers) for layer in answer
    )
    return "" if fits else f"keep must return a tuple of layers below {len(view.layers)}, not {answer!r:.60}"


def _redone(answer: Any, policy: Transition, old: StageView, new: StageView) -> str:
    fits = isinstance(answer, range) and answer.step == 1 and answer.start >= 0 and answer.stop <= len(new.layers)
    message = f"redo must return None or a range within {len(new.layers)} layers"
    return "" if answer is None or fits else f"{message}, not {answer!r:.60}"


TRANSITION = PolicyKind(
    "transition",
    Transition,
    "write a subclass of firsttoken.progressiveserve.staged_serving.transitions.Transition with a method redo",
    {"keep": _kept, "redo": _redone},
)


class Moves:
    """Moves sessions of random tokens over one random model, each alone in its engine."""

    def __init__(self) -> None:
        self.model = load_model(f"random:tiny-{DEPTH}").model
        with torch.no_grad():
            for weight in self.model.model.layers.parameters():
                if weight.dim() > 1:
                    weight.mul_(10)  # so that every layer changes the answer
        decoder = self.model.model
        end_modules = {"embed_tokens": decoder.embed_tokens, "norm": decoder.norm, "lm_head": self.model.lm_head}
        layers, passed = list(decoder.layers), [PassLayer() for _ in range(DEPTH)]
        self.views = {
            stage: make_view(stage, [passed[i] if i in gone else layers[i] for i in range(DEPTH)], end_modules)
            for stage, gone in enumerate(MISSING, start=1)
        }
        self.executor = LiveExecutor(self.model, -(-(TOKENS + STEPS) // 16))
        self.right = cache(lambda seed, stage: self.followed(TRANSITIONS["naive"], seed, stage, stage)[0])

    def followed(self, policy: Transition, seed: int, old: int, new: int) -> tuple[torch.Tensor, float]:
        """Logits [steps, vocabulary] of a session that ``old`` began and ``new`` took over, and seconds of that."""
        ids = torch.randint(3, 256, [TOKENS + STEPS], generator=torch.Generator().manual_seed(seed)).tolist()
        begun, better = (StagedModelVersion(self.model, self.views[stage], policy) for stage in (old, new))
        probe = Probe(self.executor, begun, range(self.executor.blocks))
        probe.feed(ids[:TOKENS])
        start = time.perf_counter()
        probe.carry(better, policy)
        seconds = time.perf_counter() - start
        return torch.stack([probe.feed([token]) for token in ids[TOKENS:]]), seconds

    def moved(self, policy: Transition, seed: int, old: int, new: int) -> Values:
        """One that moves, beside one that was the better stage's from the start."""
        own_logits, seconds = self.followed(policy, seed, old, new)
        right = self.right(seed, new)
        return {
            "same tokens, %": 100 * float((own_logits.argmax(-1) == right.argmax(-1)).float().mean()),
            "logits off by": float((own_logits - right).abs().mean()),
            "stall, ms": 1e3 * seconds,
            "layers again": float(len(policy.redo(self.views[old], self.views[new]) or ())),
        }


def tried_transition(path: str, profile: Profile, draws: range) -> TrialTable:
    """Try the reader's transition; the values are means over the three moves."""
    file, sessions = PolicyFile.read(Path(path), TRANSITION), Moves()
    sessions.moved(TRANSITIONS["prefill again"], 0, 1, 3)  # the first run of a process is slower

    def one(make: Callable[[], Transition], seed: int) -> Values:
        policy = make()
        moves = [sessions.moved(policy, seed, *move) for move in MOVES]
        return {heading: sum(move[heading] for move in moves) / len(moves) for heading in moves[0]}

    siblings = {name: lambda policy=policy: policy for name, policy in TRANSITIONS.items()}
    first, second, _ = (", ".join(map(str, gone)) for gone in MISSING)
    setting = (
        f"sessions of {TOKENS} tokens on {DEPTH} random layers, {first} missing in stage 1 and {second} in stage 2: "
        f"means over moves from 1 to 2, 2 to 3 and 1 to 3; {STEPS} steps beside those of the better stage alone"
    )
    return TrialTable(setting, held((path, file.watched(), file.judged), siblings, one, draws))
