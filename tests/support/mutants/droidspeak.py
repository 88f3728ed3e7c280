"""Wrong versions of what DroidSpeak describes."""

from __future__ import annotations

from mutants.running import Mutation


def _no_edge() -> None:
    """A group starts from the receiver's embeddings, wherever it lies."""
    from firsttoken.kvreuse import prefill

    prefill.start_of = lambda forward, sent, group: forward.embed()


def _empty_group() -> None:
    """Nothing is recomputed, whatever is asked for."""
    from firsttoken.kvreuse import prefill

    right = prefill.partial_prefill
    prefill.partial_prefill = lambda model, prefix, sent, group: right(model, prefix, sent, prefill.NOTHING)


def _most_layers() -> None:
    """The largest group within the bound is chosen."""
    from firsttoken.kvreuse.profile import pareto

    pareto.smallest_within = lambda groups, bound: max(
        (one for one in groups if one.relative_loss <= bound), key=lambda one: len(one.group)
    )


def _no_frontier() -> None:
    """A frontier from which nothing was left out."""
    from firsttoken.kvreuse.profile import pareto

    pareto.frontier = lambda groups: sorted(groups, key=lambda one: len(one.group))


def _edge_never_sent() -> None:
    """The E-cache is not sent: a group starts from nothing that came."""
    from firsttoken.kvreuse.pipeline.schedule import Schedule

    Schedule.sends_edge = lambda self, group: False


def _everything_sent() -> None:
    """The keys and values of the recomputed layers are sent, too."""
    from firsttoken.kvreuse.pipeline.schedule import Schedule

    Schedule.layers = lambda self, group, depth: list(range(depth))


def _no_pipeline() -> None:
    """The computation waits for everything, whatever the schedule."""
    from firsttoken.kvreuse.pipeline import schedule

    right = schedule.simulate
    schedule.simulate = lambda jobs, way: right(jobs, schedule.Schedule.SEND_REUSED)


MUTATIONS: list[Mutation] = [
    Mutation("31", "a group without its E-cache", _no_edge, "^MechanismError: Partial prefill"),
    Mutation("31", "an empty group", _empty_group, "^MechanismError: Partial prefill", quick=True),
    Mutation("31", "the most layers within the bound", _most_layers, "^MechanismError: .*[Tt]he choice of a group"),
    Mutation("31", "a frontier of all groups", _no_frontier, "^MechanismError: .*[Tt]he choice of a group"),
    Mutation("32", "no E-cache is sent", _edge_never_sent, "^MechanismError: The pipeline's schedule", quick=True),
    Mutation("32", "everything is sent", _everything_sent, "^MechanismError: The pipeline's schedule"),
    Mutation("32", "load, then compute", _no_pipeline, "^MechanismError: The pipeline's schedule"),
]
