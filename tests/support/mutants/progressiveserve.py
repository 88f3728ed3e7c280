"""Wrong versions of what ProgressiveServe describes."""

from __future__ import annotations

from mutants.running import rewritten, wrong

DISTANCE, HEALING = "firsttoken.progressiveserve.distance", "firsttoken.progressiveserve.healing"
STAGED = "firsttoken.progressiveserve.checkpoint.plan:staged"
PASS_LAYER = "firsttoken.progressiveserve.passlayer:PassLayer.forward"
TRANSITIONS = "firsttoken.progressiveserve.staged_serving.transitions"


STAND_IN = "`PassLayer` or `arrive` of the cell `mechanism`"
rewritten(
    "04", "a PassLayer of the cell shrinks what enters", "return hidden_states", "return 0.9 * hidden_states", STAND_IN
)
rewritten(
    "04", "a late layer of the cell finds ones", "nothing = torch.zeros_like", "nothing = torch.ones_like", STAND_IN
)
RULE = "the rule of the cell `mechanism`"
rewritten(
    "11", "the cell chooses what turns most", "start = int(turned.argmin", "start = int(turned.argmax", RULE, quick=True
)
rewritten("11", "the cosine for the angle", "torch.arccos(cosine.clamp(-1, 1)) / torch.pi", "cosine", RULE)


rewritten(
    "14", "the cell chooses what turns most", "start = int(turned.argmin())", "start = int(turned.argmax())", RULE
)


@wrong("14", "the deepest block is chosen", f"{DISTANCE}:choose_block", f"the library's, beside {RULE}", quick=True)
@wrong("11", "the deepest block is chosen", f"{DISTANCE}:choose_block", RULE, quick=True)
def deepest_block(right, distances, size, tokens="last"):
    return list(range(distances.depth - size, distances.depth))


@wrong("11", "the block that turns most is chosen", f"{DISTANCE}:choose_block", RULE)
def most_turning_block(right, distances, size, tokens="last"):
    start = int(distances.block(size, tokens).mean(0).argmax())
    return list(range(start, start + size))


@wrong("11", "a distance over one layer too many", f"{DISTANCE}:Distances.block", RULE)
def one_layer_too_many(right, distances, size, tokens="last"):
    return right(distances, size + 1, tokens)


LOSSES = "the losses of the cell `mechanism`"
SCORES = "the scores of the cell `mechanism`"
rewritten(
    "12",
    "the divergence of the cell is turned round",
    "return (wanted.exp() * (wanted - log_probs))",
    "return (log_probs.exp() * (log_probs - wanted))",
    LOSSES,
)
rewritten(
    "12",
    "every answer matches in the cell",
    "float(any(normal(prediction) == normal(answer) for answer in answers))",
    "1.0",
    SCORES,
    quick=True,
)
rewritten("12", "the cell chooses the shortest text", "nats[option] / sizes[option]", "nats[option]", SCORES)


@wrong("12", "every answer matches", "firsttoken.scoring:exact_match", f"the library's, beside {SCORES}")
def every_answer_matches(right, prediction, answers):
    return 1.0


@wrong("12", "halves of no strength", "firsttoken.assets.adapter_files:lora_halves", "the adapters that are served")
@wrong("15", "halves of no strength", "firsttoken.assets.adapter_files:lora_halves", "the adapters of a stage")
@wrong("62", "halves of no strength", "firsttoken.assets.adapter_files:lora_halves", "the adapters of the two agents")
def halves_of_no_strength(right, *given):
    layers = right(*given)
    return {layer: {path: (a, 0 * b) for path, (a, b) in modules.items()} for layer, modules in layers.items()}


@wrong("12", "the prompt counts as answer", f"{HEALING}:_targets", LOSSES)
def prompt_counts(right, *given):
    answer, running, distilled = right(*given)
    return answer.flip(1).cummax(1).values.flip(1), running, distilled


@wrong("12", "the teacher is left out", f"{HEALING}:_losses", LOSSES)
def no_teacher(right, *given):
    return {name: loss for name, loss in right(*given).items() if name != "distill_loss"}


PLAN = "`PassLayer` and `staged` of the cell `mechanism`"
rewritten("13", "the cell brings C before B", "block[:half], block[half:]]", "block[half:], block[:half]]", PLAN)
rewritten("13", "a PassLayer of the cell shrinks", "return hidden_states", "return 0.9 * hidden_states", PLAN)


@wrong("13", "C comes before B", STAGED, f"the library's, beside {PLAN}")
def c_before_b(right, names, stages):
    from firsttoken.progressiveserve.checkpoint.plan import by_layers

    return by_layers(names, [stages.a, stages.c, stages.b])


@wrong("13", "everything comes first", STAGED, f"the library's, beside {PLAN}")
def everything_first(right, names, stages):
    from firsttoken.progressiveserve.checkpoint.plan import single_stage

    return single_stage(names, stages.depth)


@wrong("04", "a PassLayer returns zeros", PASS_LAYER, "the library's, beside `PassLayer`")
@wrong("13", "a PassLayer returns zeros", PASS_LAYER, "PassLayer")
def passes_zeros(right, layer, hidden_states, *given, **named):
    return 0 * hidden_states


@wrong("13", "a PassLayer returns nothing", PASS_LAYER, "PassLayer")
def passes_nothing(right, *given, **named):
    return None


@wrong("13", "removed layers do not come back", "firsttoken.progressiveserve.passlayer:restore_layers", "PassLayer")
def layers_stay_away(right, model, removed):
    pass


rewritten("15", "in the cell nobody stays", "return best if moves else now", "return best", RULE)


@wrong("15", "a request moves without a prefill", f"{TRANSITIONS}:PrefillAgain.redo", f"the library's, beside {RULE}")
def moves_without_a_prefill(right, policy, old, new):
    return range(0)


@wrong("15", "adapters of no strength", "firsttoken.assets.adapter_config:LoraConfig.scale", "the adapters of a stage")
def no_strength(right, config, module):
    return 0.0


@wrong("15", "a request that stays is moved", f"{TRANSITIONS}:RequestBoundary.redo", f"the library's, beside {RULE}")
def boundary_moves(right, policy, old, new):
    return range(len(new.layers))


rewritten("16", "in the cell the last layer keeps its tokens", "return range(depth)", "return range(depth - 1)", RULE)
rewritten("16", "in the cell nobody goes on", "return range(0)", "return range(depth)", RULE)


@wrong("16", "no boundary state is kept", f"{TRANSITIONS}:FromBoundary.keep", "from boundary states")
def no_boundary_state(right, policy, view):
    return ()


@wrong("16", "the boundary lies a layer too high", f"{TRANSITIONS}:FromBoundary.redo", "from boundary states")
def boundary_a_layer_too_high(right, policy, old, new):
    layers = right(policy, old, new)
    return range(min(layers.start + 1, layers.stop), layers.stop)


@wrong("16", "a transition raises", f"{TRANSITIONS}:ChangedLayers.redo", "partial prefill", quick=True)
def transition_raises(right, policy, old, new):
    raise IndexError("list index out of range")


PLANES = "firsttoken_extras.bitplanes.plane_plan:by_planes"
ORDER = "the order of the planes of the cell `mechanism`"
rewritten(
    "17",
    "the cell's planes in reverse order",
    "for plane in range(planes)]",
    "for plane in range(planes)][::-1]",
    ORDER,
)
rewritten(
    "17", "the cell's layers backwards", "for part in parts] for plane", "for part in parts[::-1]] for plane", ORDER
)


@wrong("17", "planes in reverse order", PLANES, "the library's order of the planes")
def planes_in_reverse_order(right, shapes, split, *given):
    return right(shapes, split, lambda parts, planes: [[(part, n) for part in parts] for n in range(planes)][::-1])


@wrong("17", "layers backwards", PLANES, f"the library's, beside {ORDER}", quick=True)
def layers_backwards(right, *given):
    from firsttoken.progressiveserve.checkpoint.plan import LoadPlan, Stage

    return LoadPlan(tuple(Stage(stage.name, stage.parts[::-1]) for stage in right(*given).stages))


KEPT = "the rule of the cell `mechanism`"
rewritten("18", "in the cell one word more stays", "return draft[:stays] +", "return draft[: stays + 1] +", KEPT)
rewritten("18", "in the cell any draft stays", " and draft[stays] == said[stays]", "", KEPT)


@wrong("18", "one more is taken back", "firsttoken.engine.drafts:settle", f"the library's, beside {KEPT}")
def one_more_taken_back(right, chunk, *given):
    if (correction := chunk.request.correction) is not None:
        chunk.request.correction = max(1, correction[0] - 1), correction[1]
    return right(chunk, *given)
