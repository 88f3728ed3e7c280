"""Wrong versions of what ProgressiveServe describes."""

from __future__ import annotations

from collections.abc import Sequence

from mutants.running import Mutation


def _deepest_block() -> None:
    from firsttoken.progressiveserve import distance

    def choose_block(distances: distance.Distances, size: int, tokens: str = "last") -> list[int]:
        return list(range(distances.depth - size, distances.depth))

    distance.choose_block = choose_block


def _most_turning_block() -> None:
    from firsttoken.progressiveserve import distance

    def choose_block(distances: distance.Distances, size: int, tokens: str = "last") -> list[int]:
        start = int(distances.block(size, tokens).mean(0).argmax())
        return list(range(start, start + size))

    distance.choose_block = choose_block


def _one_layer_too_many() -> None:
    from firsttoken.progressiveserve.distance import Distances

    right = Distances.block
    Distances.block = lambda self, size, tokens="last": right(self, size + 1, tokens)


def _c_before_b() -> None:
    from firsttoken.progressiveserve.checkpoint import plan

    plan.staged = lambda names, stages: plan.by_layers(names, [stages.a, stages.c, stages.b])


def _everything_first() -> None:
    from firsttoken.progressiveserve.checkpoint import plan

    plan.staged = lambda names, stages: plan.whole(names, stages.depth)


def _passes_zeros() -> None:
    from firsttoken.progressiveserve.passlayer import PassLayer

    PassLayer.forward = lambda self, hidden_states, *args, **kwargs: 0 * hidden_states


def _passes_nothing() -> None:
    from firsttoken.progressiveserve.passlayer import PassLayer

    PassLayer.forward = lambda self, hidden_states, *args, **kwargs: None


def _layers_stay_away() -> None:
    from firsttoken.progressiveserve import passlayer

    passlayer.restore_layers = lambda model, removed: None


def _moves_without_a_prefill() -> None:
    from firsttoken.progressiveserve.staged_serving.transitions import PrefillAgain

    PrefillAgain.redo = lambda self, old, new: range(0)


def _boundary_moves() -> None:
    from firsttoken.progressiveserve.staged_serving.transitions import RequestBoundary

    RequestBoundary.redo = lambda self, old, new: range(len(new.layers))


def _no_boundary_state() -> None:
    from firsttoken.progressiveserve.staged_serving.transitions import FromBoundary

    FromBoundary.keep = lambda self, view: ()


def _boundary_a_layer_too_high() -> None:
    from firsttoken.progressiveserve.staged_serving.transitions import FromBoundary

    right = FromBoundary.redo

    def redo(self: FromBoundary, old: object, new: object) -> range:
        layers = right(self, old, new)
        return range(min(layers.start + 1, layers.stop), layers.stop)

    FromBoundary.redo = redo


def _transition_raises() -> None:
    from firsttoken.progressiveserve.staged_serving.transitions import ChangedLayers

    def redo(self: ChangedLayers, old: object, new: object) -> range:
        raise IndexError("list index out of range")

    ChangedLayers.redo = redo


def _prompt_counts() -> None:
    from firsttoken.progressiveserve import healing

    right = healing._targets

    def targets(*given: object) -> tuple:
        answer, running, distilled = right(*given)
        return answer.flip(1).cummax(1).values.flip(1), running, distilled

    healing._targets = targets


def _no_teacher() -> None:
    from firsttoken.progressiveserve import healing

    right = healing._losses

    def losses(*given: object) -> dict:
        return {name: loss for name, loss in right(*given).items() if name != "distill_loss"}

    healing._losses = losses


def _everybody_has_the_whole_link() -> None:
    from firsttoken_studies.combined.many_starts import replicas

    right = replicas.shared_link

    def shared_link(starts_s: Sequence[float], *given: object) -> replicas.Loads:
        alone = [right([begin], *given) for begin in starts_s]
        return replicas.Loads([one.ready_s[0] for one in alone], [flow for one in alone for flow in one.flows])

    replicas.shared_link = shared_link


MUTATIONS: list[Mutation] = [
    Mutation("11", "the deepest block is chosen", _deepest_block, "angular distance of a block", quick=True),
    Mutation("11", "the block that turns most is chosen", _most_turning_block, "angular distance of a block"),
    Mutation("11", "a distance over one layer too many", _one_layer_too_many, "angular distance of a block"),
    Mutation("12", "the prompt counts as answer", _prompt_counts, "loss of healing"),
    Mutation("12", "the teacher is left out", _no_teacher, "loss of healing"),
    Mutation("13", "C comes before B", _c_before_b, "staged plan"),
    Mutation("13", "everything comes first", _everything_first, "staged plan"),
    Mutation("13", "a PassLayer returns zeros", _passes_zeros, "PassLayer"),
    Mutation("13", "a PassLayer returns nothing", _passes_nothing, "PassLayer"),
    Mutation("13", "removed layers do not come back", _layers_stay_away, "PassLayer"),
    Mutation("15", "a request moves without a prefill", _moves_without_a_prefill, "transition of an open request"),
    Mutation("15", "a request that stays is moved", _boundary_moves, "transition of an open request"),
    Mutation("16", "no boundary state is kept", _no_boundary_state, "from boundary states"),
    Mutation("16", "the boundary lies a layer too high", _boundary_a_layer_too_high, "from boundary states"),
    Mutation("16", "a transition raises", _transition_raises, "partial prefill", quick=True),
    Mutation("63", "everybody has the whole link", _everybody_has_the_whole_link, "a shared link"),
]
