"""One tiny model as everything that an engine makes of it: stages, fine-tunes, layers to lend; and what each of them is
as a plain model, to hold its tokens to."""

from __future__ import annotations

import copy
import random
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fine_tunes import tuned, written
from plain_tokens import Plain, check_greedy, judged
from senders import Senders
from swarms import DEPTH
from torch import Tensor
from transformers import PreTrainedModel

from firsttoken.assets.adapter_files import CONFIG, WEIGHTS
from firsttoken.droidspeak.layer_group import Group
from firsttoken.engine.live_executor import LiveExecutor
from firsttoken.engine.lora import Adapter, parse_adapter
from firsttoken.engine.model_version import ModelVersion
from firsttoken.engine.request import Request
from firsttoken.engine.step_plan import StepPlan
from firsttoken.progressiveserve.loading.views import make_view
from firsttoken.progressiveserve.passlayer import PassLayer, pass_layers
from firsttoken.progressiveserve.staged_serving.stage_versions import FusedBeside, StagedModelVersion
from firsttoken.progressiveserve.staged_serving.transitions import PrefillAgain, Transition
from firsttoken_cpu.native.library import kernels

STAGES = {"stage 1": (2, 3, 4), "stage 2": (3, 4), "whole": ()}  # what each lacks
BEGINNING = {"first layers": (2, 3, 4, 5)}  # what a replica lacks that has two layers, and passes the others
VARIANTS = {"every layer": None, "upper layers": [3, 4, 5]}  # the layers that their adapters are for
ANY = (Group(0, 0), Group(2, 4), Group(3, 6), Group(5, 6), Group(0, 3))
EXACT = {  # the caches that a request of each kind may take, as (sender, group), and have the plain model's tokens
    # a pruned stage has the whole model's keys and values below its first gap, and nowhere else
    "in stages": [("whole", Group(lo, DEPTH)) for lo in (0, 1, 2)],
    "whole": [("twin", group) for group in ANY],
    "every layer": [("every layer", group) for group in ANY],
    # a fine-tune has its base's up to the first layer that its adapter is for
    "upper layers": [("upper layers", group) for group in ANY] + [("whole", Group(lo, DEPTH)) for lo in (1, 2, 3)],
}


class Models:
    """``model`` for engines: its layers, its stages as views, and the folders of adapters for it; and what each stage
    and variant is as a ``plain`` model."""

    def __init__(self, model: PreTrainedModel, folder: Path) -> None:
        self.folder = folder
        self.model = copy.deepcopy(model)
        self.layers = list(self.model.model.layers)
        inner = self.model.model
        ends = {"embed_tokens": inner.embed_tokens, "norm": inner.norm, "lm_head": self.model.lm_head}
        self.plain: dict[str, PreTrainedModel] = {}
        self.views = {}
        for stage, (name, missing) in enumerate((STAGES | BEGINNING).items(), start=1):
            layers = [PassLayer() if number in missing else layer for number, layer in enumerate(self.layers)]
            self.views[name] = make_view(stage, layers, ends)
            self.plain[name] = copy.deepcopy(model)
            pass_layers(self.plain[name], missing)
        self.adapters = {}
        for seed, (name, layers) in enumerate(VARIANTS.items()):
            peft = tuned(model, seed, layers=layers)
            self.adapters[name] = written(peft, folder / name)
            self.plain[name] = peft.merge_and_unload()
        draw = random.Random(0)
        self.prompts = [[draw.randrange(256) for _ in range(length)] for length in range(17, 29)]
        senders = {name: self.plain[name] for name in ("whole", *VARIANTS)} | {"twin": copy.deepcopy(model)}
        self.senders = Senders(model, senders, folder / "store", self.prompts)
        self.fused: FusedBeside = {}
        if kernels() is not None:
            list(self.version("whole", PrefillAgain()).fuse_beside(self.fused))
        self._logits: dict[tuple, Tensor] = {}

    def version(self, name: str, policy: Transition) -> StagedModelVersion:
        return StagedModelVersion(self.model, self.views[name], policy)

    def adapter(self, name: str) -> Adapter:
        """That of the variant of this name, as an engine reads it."""
        return parse_adapter(name, *((self.adapters[name] / file).read_bytes() for file in (CONFIG, WEIGHTS)), "cpu")

    def check(self, prompt: Sequence[int], said: Sequence[tuple[int, str]]) -> None:
        """Hold each token to the plain model of the name beside it."""
        tokens = [token for token, _ in said]
        for name in {name for _, name in said}:
            key = name, tuple(prompt), tuple(tokens)
            if key not in self._logits:
                self._logits[key] = judged(self.plain[name], prompt, tokens).logits
            places = [place for place, (_, by) in enumerate(said) if by == name]
            told = Plain([tokens[place] for place in places], self._logits[key][places])
            assert check_greedy(told.tokens, told) == len(places)


class Watched(LiveExecutor):
    """Counts in ``seen`` what else leaves no trace."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.seen: Counter = Counter()

    def fill(self, request: Request, layer: int, kv: Tensor) -> None:
        super().fill(request, layer, kv)
        self.seen["layers of another's cache"] += 1

    def _next_tokens(self, version: ModelVersion, step: StepPlan) -> dict[int, int]:
        self.seen["variants in one pass"] += step.variants is not None
        return super()._next_tokens(version, step)
