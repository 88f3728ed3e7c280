"""Wrong versions of what DroidSpeak describes."""

from __future__ import annotations

from dataclasses import replace
from math import inf

from mutants.running import Mutation


def _no_edge() -> None:
    """A group starts from the receiver's embeddings, wherever it lies."""
    from firsttoken.droidspeak import prefill

    prefill.start_of = lambda forward, sent, group: forward.embed()


def _empty_group() -> None:
    """Nothing is recomputed, whatever is asked for."""
    from firsttoken.droidspeak import prefill

    right = prefill.partial_prefill
    prefill.partial_prefill = lambda model, prefix, sent, group: right(model, prefix, sent, prefill.NOTHING)


def _most_layers() -> None:
    """The largest group within the bound is chosen."""
    from firsttoken.droidspeak.profile import pareto

    pareto.smallest_within = lambda groups, bound: max(
        (one for one in groups if one.relative_loss <= bound), key=lambda one: len(one.group)
    )


def _no_frontier() -> None:
    """A frontier from which nothing was left out."""
    from firsttoken.droidspeak.profile import pareto

    pareto.frontier = lambda groups: sorted(groups, key=lambda one: len(one.group))


def _edge_never_sent() -> None:
    """The E-cache is not sent: a group starts from nothing that came."""
    from firsttoken.droidspeak.pipeline.schedule import Schedule

    Schedule.sends_e_cache = lambda self, group: False


def _everything_sent() -> None:
    """The keys and values of the recomputed layers are sent, too."""
    from firsttoken.droidspeak.pipeline.schedule import Schedule

    Schedule.layers = lambda self, group, depth: list(range(depth))


def _no_pipeline() -> None:
    """The computation waits for everything, whatever the schedule."""
    from firsttoken.droidspeak.pipeline import schedule

    right = schedule.simulate
    schedule.simulate = lambda jobs, way: right(jobs, schedule.Schedule.SEND_REUSED)


def _reuse_everything() -> None:
    """The sender's keys and values are used in the layers that the receiver should compute itself."""
    from firsttoken.droidspeak.profile.layer_profiler import LayerProfiler

    LayerProfiler.own = property(lambda self: self.sent.kv)


def _critical_by_sign() -> None:
    """Every layer that loses anything is called critical."""
    from firsttoken.droidspeak.profile import pareto

    pareto.critical_layers = lambda scores, own, share: [layer for layer, score in scores if score <= own]


def _every_layer_computed() -> None:
    """All layers are recomputed, whichever group is asked for."""
    from firsttoken.droidspeak import prefill

    right = prefill.partial_prefill
    prefill.partial_prefill = lambda model, prefix, sent, group: right(model, prefix, sent, prefill.Group(0, 6))


def _blend_nothing() -> None:
    """CacheBlend that returns the sender's cache as it is."""
    from firsttoken.droidspeak import blend
    from firsttoken.droidspeak.forward import cache_of

    blend.blended_cache = lambda model, prefix, sent, *share, **options: cache_of(sent.kv)


def _blind_to_the_link() -> None:
    """A group is chosen as if the link were endless."""
    from firsttoken.droidspeak import group_selection

    right = group_selection.choose_group
    group_selection.choose_group = lambda candidates, costs, now, *rest: right(
        candidates, costs, replace(now, bytes_per_s=inf), *rest
    )


def _any_loss_is_allowed() -> None:
    """The bound on the loss is not asked."""
    from firsttoken.droidspeak import group_selection

    right = group_selection._choices
    group_selection._choices = lambda candidates, costs, now, bound, schedule: right(
        candidates, costs, now, inf, schedule
    )


def _the_first_belief_stays() -> None:
    """What a transfer took changes nothing."""
    from firsttoken.droidspeak.group_selection import LinkEstimate

    LinkEstimate.observe = lambda self, nbytes, seconds: None


def _good_ones_decide() -> None:
    """The budget is kept on the good answers instead of the spoiled ones."""
    from firsttoken.droidspeak import gate

    right = gate.calibrate
    gate.calibrate = lambda signals, failed, *, signal, miss_budget: right(
        signals, failed, signal=signal, false_alarm_budget=miss_budget
    )


MUTATIONS: list[Mutation] = [
    Mutation("30", "everything is reused", _reuse_everything, "^MechanismError: The reuse of one layer"),
    Mutation("30", "any loss is critical", _critical_by_sign, "^MechanismError: The rule for critical layers"),
    Mutation("31", "a group without its E-cache", _no_edge, "^MechanismError: Partial prefill"),
    Mutation("31", "an empty group", _empty_group, "^MechanismError: Partial prefill", quick=True),
    Mutation("31", "the most layers within the bound", _most_layers, "^MechanismError: .*[Tt]he choice of a group"),
    Mutation("31", "a frontier of all groups", _no_frontier, "^MechanismError: .*[Tt]he choice of a group"),
    Mutation("32", "no E-cache is sent", _edge_never_sent, "^MechanismError: The pipeline's schedule", quick=True),
    Mutation("32", "everything is sent", _everything_sent, "^MechanismError: The pipeline's schedule"),
    Mutation("32", "load, then compute", _no_pipeline, "^MechanismError: The pipeline's schedule"),
    Mutation("33", "every layer is computed", _every_layer_computed, "^MechanismError: Partial prefill"),
    Mutation("33", "a blend that mends nothing", _blend_nothing, "^MechanismError: CacheBlend"),
    Mutation(
        "35",
        "blind to the link",
        _blind_to_the_link,
        "^MechanismError: The choice of a group for a link",
    ),
    Mutation("35", "any loss is allowed", _any_loss_is_allowed, "^MechanismError: The choice of a group for a link"),
    Mutation(
        "35", "the first belief stays", _the_first_belief_stays, "^MechanismError: The choice of a group for a link"
    ),
    Mutation(
        "35", "a gate that keeps to false alarms", _good_ones_decide, "^MechanismError: The gate before an answer"
    ),
]
