"""Plausible changes of the mechanisms that notebooks hand to studies, each with the figures that must show it."""

from __future__ import annotations

import functools
import inspect
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from matplotlib.figure import Figure
from torch import Tensor

from firsttoken.assets.dense_shape import DenseShape
from firsttoken.cps.policies import CrossPoint
from firsttoken.cps.policies.online import CostCurve
from firsttoken.droidspeak.forward import Forward, cache_of
from firsttoken.droidspeak.group_selection import GroupCosts, GroupLoss
from firsttoken.droidspeak.layer_group import Group
from firsttoken.droidspeak.prefix import LayerKV
from firsttoken.droidspeak.profile.pareto import frontier
from firsttoken.droidspeak.profile.profile_transfer import item_losses
from firsttoken.engine.preemption.preemption_policy import Action
from firsttoken.engine.request import Request, ScheduledChunk
from firsttoken.engine.schedulers.sarathi import Sarathi
from firsttoken.petals.messages import SequenceChunk
from firsttoken.petals.routing import Reachable
from firsttoken.petals.server_session import ServerFault
from firsttoken.simulation.costs.operator_tables import OperatorTables
from firsttoken_studies.nb12_staged_healing import figures as healing_figures
from firsttoken_studies.nb12_staged_healing import stage_tasks
from firsttoken_studies.nb17_bits_before_layers import figures as plane_figures
from firsttoken_studies.nb18_what_a_draft_is_worth import figures as draft_figures
from firsttoken_studies.nb21_swap_or_recompute import figures as recovery_figures
from firsttoken_studies.nb22_cross_point_scheduler import figures as policy_figures
from firsttoken_studies.nb23_online_cross_point import study as online_figures
from firsttoken_studies.nb24_who_is_preempted import figures as victim_figures
from firsttoken_studies.nb30_full_reuse_and_sensitivity import sensitivity
from firsttoken_studies.nb31_contiguous_groups import figures as group_figures
from firsttoken_studies.nb32_pipelined_loading import study as pipelined_loading
from firsttoken_studies.nb33_latency_and_quality import figures as method_figures
from firsttoken_studies.nb33_latency_and_quality import prefill_latency
from firsttoken_studies.nb34_profile_transfer import study as transfer_figures
from firsttoken_studies.nb35_a_group_for_this_link import adaptive_group
from firsttoken_studies.nb36_throughput_under_load import figures as load_figures
from firsttoken_studies.nb40_generation_stalls import figures as stall_figures
from firsttoken_studies.nb41_serving_capacity import figures as capacity_figures
from firsttoken_studies.nb43_the_cost_of_a_batch import figures as batch_figures
from firsttoken_studies.nb46_on_the_stated_gpus import card_capacity, paper_cards
from firsttoken_studies.nb47_the_other_reports_on_gpus import figures as card_figures
from firsttoken_studies.nb50_a_swarm_that_survives import figures as survival_figures
from firsttoken_studies.nb51_eight_bits import eight_bits as eight_bits_figures
from firsttoken_studies.nb51_eight_bits import eight_bits_tasks as task_figures
from firsttoken_studies.nb52_chains_and_offloading import figures as swarm_figures
from firsttoken_studies.nb53_training_through_the_chain import figures as tuning_figures
from firsttoken_studies.nb54_validation_and_privacy import figures as trust_figures
from firsttoken_studies.nb56_a_start_that_borrows import borrowed_start, parallel_start
from firsttoken_studies.nb62_agents_in_turns import figures as agent_figures
from firsttoken_studies.progressiveserve import recovery_figures as session_figures
from firsttoken_studies.progressiveserve import stage_figures
from firsttoken_studies.progressiveserve.coldstart import figures as start_figures
from firsttoken_studies.record.plot import COLOURS


@dataclass(frozen=True)
class Change:
    """``mechanisms`` in place of those that ``study`` takes, and ``figures``, functions of (recorded, now) and the same
    two of each study that they read."""

    study: str
    name: str
    mechanisms: dict[str, Any]
    figures: tuple[Callable[..., Figure], ...]
    reads: Sequence[str] = ()


CHANGES: list[Change] = []


def watched(mechanism: Any, calls: list[str]) -> Any:
    """Return ``mechanism``, a function or a class, which notes in ``calls`` that it, or a method of it, was called."""
    if not inspect.isclass(mechanism):

        @functools.wraps(mechanism)
        def noted(*inputs: Any, **named: Any) -> Any:
            calls.append(mechanism.__name__)
            return mechanism(*inputs, **named)

        return noted
    own = {name: member for name, member in vars(mechanism).items() if inspect.isroutine(member)}
    plain = {name: watched(getattr(member, "__func__", member), calls) for name, member in own.items()}
    made = {name: staticmethod(plain[name]) if isinstance(own[name], staticmethod) else plain[name] for name in own}
    return type(mechanism.__name__, (mechanism,), made)


def changed(
    study: str, mechanism: str, *figures: Callable[..., Figure], reads: Sequence[str] = ()
) -> Callable[[Any], Any]:
    """Decorate a class or function that stands for ``mechanism`` in ``study``, and that moves these ``figures``."""

    def register(replacement: Any) -> Any:
        CHANGES.append(Change(study, replacement.__name__, {mechanism: replacement}, figures, reads))
        return replacement

    return register


def rings(figure: Figure) -> list[tuple[Any, ...]]:
    """Return what ``figure`` draws of a changed mechanism, as numbers, without what it draws of the library's, too."""
    import matplotlib.pyplot as plt

    ringed, plain = [], set()
    for axes in figure.axes:
        for artist in (*axes.lines, *axes.patches, *axes.collections):
            shape = _numbers(artist)
            if any(
                effect._gc.get("foreground") == COLOURS["your mechanism"] for effect in artist.get_path_effects() or ()
            ):
                ringed.append(shape)
            else:
                plain.add(shape)
    plt.close(figure)
    return [shape for shape in ringed if shape not in plain]


def _numbers(artist: Any) -> tuple[Any, ...]:
    """Return a line's points, a bar's corners, or the vertices and places of a collection."""
    if hasattr(artist, "get_xydata"):
        numbers = artist.get_xydata()
    elif hasattr(artist, "get_offsets"):
        numbers = np.concatenate([*(path.vertices for path in artist.get_paths()), artist.get_offsets()])
    else:
        numbers = artist.get_patch_transform().transform(artist.get_path().vertices)
    return (type(artist).__name__, *np.round(np.asarray(numbers, float).ravel(), 9))


@changed("crosspoint_replayed", "policy", policy_figures.policy_bars, policy_figures.threshold_gains)
class RuleInverted(CrossPoint):
    def choose(self, tokens: int, now_s: float) -> Action:
        return Action.RECOMPUTE if tokens <= self.threshold else Action.SWAP


@changed("generation_stalls", "sarathi", stall_figures.stalls)
class ChunksFirst(Sarathi):
    def schedule(self) -> list[ScheduledChunk]:
        return self.chunks(self.config.token_budget, admit=True) or self.ready()[0]


@changed("victims", "first_that_came", victim_figures.by_victim)
def the_one_with_most_tokens(running: list[Request]) -> Request:
    return max(running, key=lambda request: request.cached)


@changed("swarm_churn", "join", swarm_figures.churn)
def the_first_blocks(servers: Sequence[Reachable], depth: int, count: int) -> range:
    return range(count)


@changed("swarm_chains", "search", swarm_figures.crossover)
def always_the_smallest(servers: Sequence[Reachable], depth: int) -> tuple[float, list[tuple[str, int, int]]]:
    first, seconds, path = 0, 0.0, []
    while first < depth:
        server = min((near for near in servers if first in near.blocks), key=lambda near: len(near.blocks))
        path.append((server.name, first, server.blocks.stop))
        seconds += server.ping_s + (server.blocks.stop - first) / server.throughput
        first = server.blocks.stop
    return seconds, path


@changed("deferral_sweep", "rule", start_figures.trade_off)
@changed("layer_distance", "rule", stage_figures.distance_map, stage_figures.chosen_blocks)
def turned_most(stream: Tensor, size: int) -> tuple[list[int], Tensor]:
    cosines = torch.cosine_similarity(stream[:-size], stream[size:], dim=-1).mean(1)
    start = int(cosines.argmin())
    return list(range(start, start + size)), cosines


@changed("online_crosspoint", "curve", online_figures.totals, online_figures.courses)
class WithoutFixedTerm(CostCurve):
    def predict(self, tokens: int) -> float:
        return max(super().predict(tokens) - self._prices[0], 1e-9)


@changed("serving_capacity", "search", capacity_figures.capacities)
def a_rate_by_the_longest_gap(
    serve: Callable[[float], Sequence[Request]], tbt_s: float, start: float
) -> tuple[float, Sequence[float]]:
    gaps = [np.diff(request.times_s).max() for request in serve(start)]
    return start * tbt_s / max(gaps), [start]


@changed("prefill_latency", "partial", prefill_latency.partial_times)
@changed("transitions", "partial", group_figures.transition_errors)
def without_e_cache(model: Any, prefix: Any, sent: Any, group: Any) -> Any:
    forward = Forward(model, prefix)
    cache = cache_of(None if layer in group else kv for layer, kv in enumerate(sent.kv))
    forward.run(forward.embed(), group.layers, cache)
    return cache


@changed("layer_profile", "choose", group_figures.contiguous_groups, group_figures.chosen_groups)
def most_layers(groups: Any, bound: float) -> Any:
    return frontier(groups), sorted(groups, key=lambda profiled: len(profiled.group))[-2]


@changed("reuse_methods", "choose", method_figures.quality_by_latency)
@changed("reuse_methods", "choose", method_figures.gains, reads=["layer_profile"])
def half_of_the_layers(groups: Any, bound: float, choosing: Any, judging: Any) -> Any:
    return sorted(groups, key=lambda profiled: len(profiled.group))[len(groups) // 2].group, 0.0


@changed("pipelined_loading", "order", pipelined_loading.ttft_by_link)
def e_cache_last(edge: Sequence[str], layers: Sequence[int]) -> list[str | int]:
    return [*layers, *edge]


@changed("adaptive_group", "choose", adaptive_group.choices)
def always_everything(
    groups: Sequence[GroupLoss], costs: GroupCosts, tokens: int, bytes_per_s: float, bound: float
) -> Group:
    return costs.full


@changed("card_capacity", "step_s", card_capacity.capacities_by_card)
@changed("objective_sweep", "step_s", paper_cards.capacity_by_bound)
@changed("fixed_load", "step_s", paper_cards.times_by_load)
def a_step_of_its_tokens(
    tables: OperatorTables, shape: DenseShape, gpus: int, prefills: Sequence[tuple[int, int]], contexts: Sequence[int]
) -> float:
    return 0.02 + 1e-4 * (len(contexts) + sum(new for _, new in prefills)) / gpus


@changed("eight_bits", "over_the_wire", eight_bits_figures.quality)
def one_scale_a_batch(hidden: Tensor) -> tuple[Tensor, int]:
    scale = hidden.abs().amax() / 127
    return (hidden / scale).round() * scale, hidden.numel() + 4


@changed("eight_bits", "mixed_product", eight_bits_figures.quality)
@changed("eight_bits_tasks", "mixed_product", task_figures.accuracy_change)
def inputs_in_two_bits(x: Tensor, weight: Tensor, threshold: float = 6.0) -> Tensor:
    scale = x.abs().amax(-1, keepdim=True).clamp_min(1e-30)
    return (x / scale).round() * scale @ weight.t()


@changed("swarm_survival", "chain", survival_figures.recovery_times, survival_figures.token_times)
class PrefixOfZeros:
    """Send a successor zeros in the place of what the lost server was sent."""

    def __init__(self, swarm: Any, spans: Sequence[range]) -> None:
        self.swarm, self.spans, self.lines, self.lost = swarm, spans, {}, set()

    async def run(self, chunks: Sequence[SequenceChunk], hidden: Tensor) -> Tensor:
        for layers in self.spans:
            hidden = await self.through(layers, chunks[0], hidden)
        return hidden

    async def through(self, layers: range, chunk: SequenceChunk, hidden: Tensor) -> Tensor:
        if layers not in self.lines:
            ((_, record),) = await self.swarm.route(layers, without=self.lost)
            self.lines[layers] = self.swarm.open_session(record, layers, "float32"), record
        session, _ = self.lines[layers]
        cached = session.known.get(chunk.number, 0)
        zeros = hidden.new_zeros(chunk.end - cached - len(hidden), hidden.shape[1])
        try:
            message = [SequenceChunk(chunk.number, cached, chunk.end)]
            return (await session.run(message, torch.cat([zeros, hidden])))[-len(hidden) :]
        except ServerFault:
            self.lost.add(self.lines.pop(layers)[1].server)
            return await self.through(layers, chunk, hidden)


@changed("swarm_validation", "audit", trust_figures.caught)
def whatever_is_answered_agrees(*_: Any) -> str:
    return "agreed"


@changed("swarm_privacy", "sent", trust_figures.inverted)
def with_noise(states: Tensor) -> Tensor:
    return states + 3 * states.std() * torch.randn(states.shape, generator=torch.Generator().manual_seed(0))


@changed("swarm_tuning", "through", tuning_figures.curves, tuning_figures.step_times)
class FirstServerFirst(torch.autograd.Function):
    """Go back through the servers in the order of the way forward."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, *servers: Callable[[Tensor], Tensor]) -> Tensor:
        ctx.servers, ctx.entered = servers, []
        for server in servers:
            ctx.entered.append(hidden)
            hidden = server(hidden)
        return hidden

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        for server, entered in zip(ctx.servers, ctx.entered, strict=True):
            with torch.enable_grad():
                entered = entered.detach().requires_grad_()
                (gradient,) = torch.autograd.grad(server(entered), entered, gradient)
        return gradient, *(None for _ in ctx.servers)


@changed("borrowed_start", "take_over", borrowed_start.taking_over, borrowed_start.first_tokens)
def nothing_before_all(come: int, depth: int) -> int:
    return come if come == depth else 0


@changed("parallel_start", "divide", parallel_start.first_tokens)
def the_first_fetches_little(sizes: Sequence[int], count: int) -> list[range]:
    """Divide the parts so that each process but the last fetches one, the first with the ends."""
    return [*(range(part, part + 1) for part in range(count - 1)), range(count - 1, len(sizes))]


@changed("reports_on_cards", "ways", card_figures.recovery_times)
def copies_without_a_price(costs: Any, kv: Any, copy_s: float, tokens: int, copies: int) -> tuple[float, float]:
    return costs.step_s([(0, tokens)], []), 2 * kv.blocks(tokens) * kv.block_bytes / costs.swap_bytes_s


@changed("reports_on_cards", "first_token", card_figures.speedups)
def one_after_the_other(
    own_s: float, head_s: float, share: float, cache_bytes: float, entry_bytes: float, bytes_s: float
) -> float:
    return share * (own_s - head_s) + head_s + ((1 - share) * cache_bytes + entry_bytes) / bytes_s


@changed("batch_cost", "step_ms", batch_figures.live_costs, batch_figures.table_costs)
def a_pass_for_each(prefill_ms: Any, decode_ms: Any, chunks: Sequence[tuple[int, int]], decodes: int) -> float:
    return sum(prefill_ms(new) for _, new in chunks) + decode_ms(decodes)


@changed("recovery_latency", "cut", recovery_figures.latency_by_length, recovery_figures.block_sizes)
def a_copy_a_block(block: Tensor) -> list[Tensor]:
    return [block]


@changed("layer_profile", "reused", sensitivity.full_reuse, sensitivity.sensitivity, sensitivity.item_spread)
def keys_without_values(recomputed: Any, sent: Any, layers: Any) -> Any:
    return cache_of(
        LayerKV(sent.kv[index].keys, 0 * kv.values) if index in layers else kv for index, kv in enumerate(recomputed.kv)
    )


@changed("layer_profile", "critical", sensitivity.sensitivity)
def every_layer(scores: Sequence[float], own_score: float) -> list[int]:
    return list(range(len(scores)))


@changed("profile_transfer", "choose", transfer_figures.differences, transfer_figures.stability)
def the_most_layers_but_all(groups: Any, bound: float) -> Any:
    return sorted(groups, key=lambda profiled: len(profiled.group))[-2]


@changed("profile_transfer", "judge", transfer_figures.differences)
def half_of_the_loss(groups: Any, group: Group) -> list[float]:
    return [lost / 2 for lost in item_losses(groups, group)]


@changed("reuse_throughput", "prefill_s", load_figures.under_load)
def load_then_compute(full_s: float, computing_s: float, loading_s: float) -> float:
    return computing_s + loading_s


COIN = random.Random(0)  # all stages of a model without width give one answer, which a coin alone tells apart


@changed("stage_quality", "score", stage_figures.stage_scores)
def by_a_coin(prediction: str, answers: Sequence[str]) -> float:
    return float(COIN.random() < 0.5)


@changed("stage_tasks", "choose", stage_tasks.accuracy_by_stage)
def any_option(nats: Sequence[float], sizes: Sequence[int]) -> int:
    return COIN.randrange(len(nats))


@changed("healing_live", "distill_loss", healing_figures.healing_course)
def divergence_turned_round(logits: Tensor, teacher: Tensor) -> Tensor:
    log_probs, wanted = logits.log_softmax(-1), teacher.log_softmax(-1)
    return (log_probs.exp() * (log_probs - wanted)).sum(-1).mean()


@changed("cold_start", "groups", start_figures.phase_stacks)
def half_of_the_block_waits(depth: int, block: Sequence[int]) -> list[list[int]]:
    late = list(block[len(block) // 2 :])
    return [[layer for layer in range(depth) if layer not in late], late]


@changed("recovery_timeline", "stage_of", session_figures.growth_of_service)
def to_the_whole_model_alone(now: int, best: int, moves: bool) -> int:
    return best if moves and best == 3 else now


@changed("open_session", "rule", session_figures.continuation_losses)
def everybody_goes_on(policy: str, missing: Sequence[int], changed: range, depth: int) -> range:
    return range(0)


@changed("precision_start", "order", plane_figures.starts)
def first_layer_exact(parts: Sequence[str], planes: int) -> list[list[tuple[str, int]]]:
    stages = [[(part, plane) for part in parts if plane == 0 or part != parts[1]] for plane in range(planes)]
    stages[0] += [(parts[1], plane) for plane in range(1, planes)]
    return stages


@changed("drafts_kept", "verify", draft_figures.kept)
def half_of_a_draft(draft: Sequence[int], opinions: Sequence[int]) -> list[int]:
    half = len(draft) // 2  # a random model says one word again and again, which every stage of it foresees
    return [*draft[:half], opinions[half]]


@changed("agents", "from_pool", agent_figures.by_turn)
def values_without_scale(rows: Tensor, blocks: Sequence[int], tokens: int) -> Tensor:
    kv = rows[list(blocks)].permute(1, 2, 4, 0, 3, 5).flatten(3, 4)[:, :, :, :tokens].clone()
    kv[:, 1] /= kv[:, 1].abs().amax() / 100
    return kv
