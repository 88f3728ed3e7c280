"""The open session, settled by measurement: what each transition policy costs, and how wrong the naive one is."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch import Tensor
from torch.nn import functional

from firsttoken.assets.corpora import running_text, token_windows
from firsttoken.assets.needs import CONTEXT, ModelFacts, Need, check, text_of
from firsttoken.engine.live_executor import LiveExecutor
from firsttoken.engine.request_limits import BLOCK_TOKENS
from firsttoken.link.shaped import Link
from firsttoken.progressiveserve.base_model import ServedConfig, load_served
from firsttoken.progressiveserve.loading.loader import StageLoad
from firsttoken.progressiveserve.loading.meta_model import MetaModel
from firsttoken.progressiveserve.loading.views import StageView, changed
from firsttoken.progressiveserve.passlayer import PassLayer
from firsttoken.progressiveserve.staged_serving.stage_versions import StagedModelVersion
from firsttoken.progressiveserve.staged_serving.transitions import TRANSITIONS, Transition
from firsttoken.study.profile import Profile
from firsttoken.study.progress import track
from firsttoken.study.stats import bootstrap, paired_bootstrap
from firsttoken.study.summary import Summary
from firsttoken.study.timing import synchronise
from firsttoken_studies.progressiveserve.coldstart.checkpoints import Checkpoint, bare_checkpoint, served_checkpoint
from firsttoken_studies.progressiveserve.probe import Probe
from firsttoken_studies.record.results import Outcome, Rows, frame_of

if TYPE_CHECKING:
    import pandas

MOVES = ((1, 2), (2, 3), (1, 3))
ROUNDING = 0.5  # what right logits may differ by: four steps of bf16 at 16; the naive ones are off by 10 and more


LayersAgain: TypeAlias = Callable[[str, Sequence[int], range, int], range | None]
"""The name of a policy, the missing layers, those that change, and how many there are -> the layers whose keys and
values are computed again; None where a request stays with its stage."""


@dataclass(frozen=True)
class OpenSessionConfig:
    """Costs at ``contexts`` tokens, ``repeats`` each; quality of ``windows`` continuations of ``continue_tokens``
    tokens after ``context_tokens``."""

    contexts: tuple[int, ...]
    repeats: int
    windows: int
    context_tokens: int
    continue_tokens: int

    def needs(self) -> list[Need]:
        """Require a context that holds the longest sequence and the token that follows it, and a text that holds all of
        them."""
        longest, continued = max(self.contexts) + 1, self.context_tokens + self.continue_tokens
        windows = "open_session.windows x (context_tokens + continue_tokens)"
        return [
            Need("open_session.contexts", longest, CONTEXT),
            Need("open_session.context_tokens + continue_tokens", continued, CONTEXT),
            Need("open_session.contexts", longest, text_of("test")),
            Need(windows, self.windows * continued, text_of("test")),
        ]


class LoadedStages:
    """A staged checkpoint whose stages are brought one after another, each a view of the same weights, and one request
    of up to ``tokens`` tokens; ``last`` is the stage that came last, 0 before any."""

    def __init__(self, checkpoint: Checkpoint, device: torch.device, dtype: torch.dtype, *, tokens: int) -> None:
        self.device, self.last = device, 0
        self._checkpoint, self._blocks = checkpoint, range(-(-tokens // BLOCK_TOKENS))
        self._meta_model = MetaModel(checkpoint.staged, checkpoint.manifest, device, dtype)
        self._executor = LiveExecutor(
            self._meta_model.model, len(self._blocks), block_tokens=BLOCK_TOKENS, device=device
        )
        self._views: dict[int, StageView] = {0: self._meta_model.empty_view()}

    @property
    def stages(self) -> range:
        """Return the numbers of all stages."""
        return range(1, len(self._checkpoint.manifest.stages) + 1)

    def bring(self, stage: int) -> None:
        """Load ``stage`` over those that are there."""
        folder, manifest, before = self._checkpoint.staged, self._checkpoint.manifest, self._views[self.last]
        self.last = stage
        self._views[stage] = StageLoad(folder, manifest, [stage], [Link()], self._meta_model, before).wait()

    def view(self, stage: int, policy: Transition) -> StagedModelVersion:
        """``stage`` as the engine runs it, which keeps what ``policy`` needs."""
        return StagedModelVersion(self._meta_model.model, self._views[stage], policy)

    def begun(self, stage: int, ids: Sequence[int], policy: Transition) -> Probe:
        """A request of ``ids`` under ``stage``, in the place of the one before it."""
        probe = Probe(self._executor, self.view(stage, policy), self._blocks)
        probe.feed(ids)
        return probe


class ByRule(Transition):
    """The policy ``name`` as ``rule`` has it. Hidden states are kept where a run of missing layers begins, for any
    rule may begin there."""

    def __init__(self, name: str, rule: LayersAgain) -> None:
        self.name, self._rule = name, rule

    def keep(self, view: StageView) -> tuple[int, ...]:
        return TRANSITIONS["partial prefill"].keep(view)

    def redo(self, old: StageView, new: StageView) -> range | None:
        missing = [i for i, layer in enumerate(old.layers) if isinstance(layer, PassLayer)]
        return self._rule(self.name, missing, changed(old, new), len(new.layers))


def open_session(profile: Profile, *, rule: LayersAgain | None = None) -> Outcome:
    """Every policy at every transition: milliseconds by context length, and what it does to the next tokens.

    "healed" has the stages' adapters, which change with the stage and so touch every layer; "bare" has none. The
    policies are those of a reader's ``rule`` where there is one.
    """
    policies = TRANSITIONS if rule is None else {name: ByRule(name, rule) for name in TRANSITIONS}
    config = profile.section("open_session", OpenSessionConfig)
    check([*profile.section("served", ServedConfig).needs(), *config.needs()], ModelFacts(profile.model))
    served = load_served(profile)
    longest, continued = max(config.contexts) + 1, config.context_tokens + config.continue_tokens
    # windows of their own length each: as many of the longest context as continuations would be more text than there is
    (timed,) = token_windows(running_text("test"), served.tokenizer, longest, 1).tolist()
    read = token_windows(running_text("test"), served.tokenizer, continued, config.windows).tolist()
    checkpoints = {"healed": served_checkpoint(profile, served), "bare": bare_checkpoint(served)}
    rows: Rows = []
    for kind, checkpoint in checkpoints.items():
        stages = LoadedStages(checkpoint, profile.torch_device(), profile.torch_dtype(), tokens=max(longest, continued))
        for stage in stages.stages:
            stages.bring(stage)
        jobs = [(n, move, policy) for n in config.contexts for move in MOVES for policy in policies.values()]
        right: dict[tuple[int, int], Tensor] = {}  # by context and stage: the same for every policy and where it began
        for tokens, move, policy in track(jobs, desc=f"transitions, {kind}"):
            ids, new = timed[: tokens + 1], move[1]
            if (tokens, new) not in right:
                right[tokens, new] = stages.begun(new, ids[:-1], TRANSITIONS["naive"]).feed(ids[-1:])
            label = {"kind": kind, "measure": "cost", "context_tokens": tokens}
            rows += [label | row for row in _costs(stages, ids, right[tokens, new], move, policy, config.repeats)]
        for index, ids in enumerate(track(read, desc=f"continuations, {kind}")):
            label = {"kind": kind, "measure": "continuation", "window": index}
            rows += [label | row for row in _continuations(stages, ids, config, policies.values())]
    return Outcome(rows, provenance=served.provenance)


def _costs(
    stages: LoadedStages, ids: Sequence[int], right: Tensor, move: tuple[int, int], policy: Transition, repeats: int
) -> Iterator[dict[str, Any]]:
    """The stall of one transition, beside the decode step that follows it, and the error of that step's logits, where
    those of the new stage alone are ``right`` [vocabulary]."""
    old, new = move
    *before, following = ids
    device = stages.device
    for repeat in range(repeats):
        probe, better = stages.begun(old, before, policy), stages.view(new, policy)
        kept_bytes = probe.kept_bytes
        synchronise(device)
        start = time.perf_counter()
        probe.carry(better, policy)
        synchronise(device)
        carried = time.perf_counter()
        logits = probe.feed([following])
        synchronise(device)
        yield {
            "policy": policy.name,
            "from_stage": old,
            "to_stage": new,
            "repeat": repeat,
            "cost_ms": 1000 * (carried - start),
            "decode_ms": 1000 * (time.perf_counter() - carried),
            "logit_error": float((logits - right).abs().max()),
            "same_token": bool(logits.argmax() == right.argmax()),
            "kept_bytes": kept_bytes,
        }


def _continuations(
    stages: LoadedStages, ids: Sequence[int], config: OpenSessionConfig, policies: Iterable[Transition]
) -> Iterator[dict[str, Any]]:
    """Mean loss in nats a token of the true continuation, decoded after a move from stage 1 to the whole model."""
    cut, end = config.context_tokens, config.context_tokens + config.continue_tokens
    for policy in policies:
        probe = stages.begun(1, ids[: cut - 1], policy)
        probe.carry(stages.view(stages.last, policy), policy)
        losses = [float(_loss(probe.feed([ids[i - 1]]), ids[i])) for i in range(cut, end)]
        yield {"policy": policy.name, "nll": sum(losses) / len(losses), "tokens": len(losses)}


def _loss(logits: torch.Tensor, target: int) -> torch.Tensor:
    return functional.cross_entropy(logits.float()[None], torch.tensor([target], device=logits.device))


def session_summary(rows: Rows, parameters: Mapping[str, Any]) -> Summary:
    """Summarize by kind the cost of every policy in ms at the longest context, and its effect on the logits and on what
    follows."""
    summary, longest = Summary(), max(parameters["open_session"]["contexts"])
    for kind in ("healed", "bare"):
        costs, continuations = (frame_of(rows, measure=measure, kind=kind) for measure in ("cost", "continuation"))
        losses = dict(list(continuations.groupby("policy").nll)) if len(continuations) else {}
        for name in TRANSITIONS:
            labels, chosen = {"policy": name, "variant": kind}, costs[costs.policy == name]
            longest_costs = chosen[(chosen.context_tokens == longest) & (chosen.from_stage == 1)]
            cost = {"cost_ms": ("cost_ms", "median", f"ms at {longest} tokens")}
            summary.by(longest_costs, {}, cost, **labels, context_tokens=longest)
            summary.add("logit_error", {"value": chosen.logit_error.max(), "n": len(chosen)}, **labels)
            summary.by(chosen, {}, {"same_token_pct": ("same_token", "mean", "%", 100)}, **labels)
            if name in losses:
                excess = paired_bootstrap(losses[name], losses["prefill again"])
                summary.add("nll", bootstrap(losses[name]).summary("nats a token"), **labels)
                summary.add("excess_nll", excess.summary("nats a token"), **labels)
        summary.add("default_policy", {"value": cheapest_correct(costs), "unit": "policy"}, variant=kind)
    return summary


def cheapest_correct(costs: pandas.DataFrame) -> str:
    """Return the policy of least total cost among those that move an open request and always give the right logits.

    The request boundary costs nothing and moves nothing: it is what a request gets that does not ask to be moved.
    """
    by_policy = costs.groupby("policy").agg({"logit_error": "max", "cost_ms": "sum"})
    right = [name for name, policy_row in by_policy.iterrows() if policy_row.logit_error <= ROUNDING]
    moving = [name for name in TRANSITIONS if name in right and name != "request boundary"]
    return min(moving, key=by_policy.cost_ms.get, default="none")
