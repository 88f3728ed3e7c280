"""Wrong versions of what DroidSpeak describes."""

from __future__ import annotations

from dataclasses import replace
from math import inf

from mutants.running import rewritten, wrong

PREFILL, PARETO = "firsttoken.droidspeak.prefill", "firsttoken.droidspeak.profile.pareto"
SCHEDULE, SELECTION = "firsttoken.droidspeak.pipeline.schedule", "firsttoken.droidspeak.group_selection"
PARTIAL = "^MechanismError: Partial prefill"
CELL_PARTIAL, CELL_CHOICE = "partial prefill of the cell `mechanism`", "the choice of a group of the cell `mechanism`"
CELL_REUSE, CELL_CRITICAL = (
    "the reuse of layers by the cell `mechanism`",
    "rule for critical layers of the cell `mechanism`",
)
TRANSFER = "the transfer by the cell `mechanism`"
BLEND, SCORE = "^MechanismError: CacheBlend", "^MechanismError: the score of an answer"
PIPELINE = "^MechanismError: .*the pipeline's schedule of the cell"
LINK, BELIEF = "^MechanismError: .*the choice of a group in the cell", "^MechanismError: the belief about a link"
ADAPTERS = "firsttoken.assets.adapter_config"
SHAPED, SHAPED_LINK = "firsttoken.link.shaped", "^MechanismError: The shaped link"
PROFILER = "firsttoken.droidspeak.profile.layer_profiler:LayerProfiler.own"


REUSE = "the function `reuse` of the cell `mechanism`"
rewritten("05", "a group from the tokens", "if 0 in group else entering[min(group, default=0)]", "", REUSE, quick=True)
rewritten(
    "05",
    "a group that is one layer short",
    "    for layer in group:",
    "    for layer in group[1:]:",
    "`reuse` of the cell",
)
rewritten(
    "05", "the layer below", "entering[min(group, default=0)]", "entering[max(min(group, default=0) - 1, 0)]", REUSE
)


@wrong("30", "everything is reused", PROFILER, CELL_REUSE)
def reuse_everything(right, profiler):
    """The sender's keys and values are used in the layers that the receiver should compute itself."""
    return profiler.sent.kv


@wrong("30", "any loss is critical", f"{PARETO}:critical_layers", CELL_CRITICAL)
def critical_by_sign(right, scores, own, share):
    return [layer for layer, score in scores if score <= own]


rewritten(
    "30", "all layers but these", "if index in layers else", "if index not in layers else", CELL_REUSE, quick=True
)
rewritten("30", "the layer beside is reused", "if index in layers else", "if index + 1 in layers else", CELL_REUSE)
rewritten("30", "a tenth of any score", "> share * own_score", "> share", CELL_CRITICAL)


rewritten("31", "a cell without the E-cache", "sent.e_cache[group.lo] if group.lo else", "", CELL_PARTIAL, quick=True)
rewritten("31", "a group without its last layer", "in group else kv", "in group.layers[:-1] else kv", CELL_PARTIAL)
rewritten(
    "31", "groups by loss alone", "(len(profiled.group), profiled.relative_loss)", "profiled.relative_loss", CELL_CHOICE
)
rewritten("31", "the first group out of the bound", "relative_loss <= bound", "relative_loss > bound", CELL_CHOICE)


@wrong("31", "a group without its E-cache", f"{PREFILL}:group_input", CELL_PARTIAL)
def no_edge(right, forward, sent, group):
    """A group starts from the receiver's embeddings, wherever it lies."""
    return forward.embed()


@wrong("31", "an empty group", f"{PREFILL}:partial_prefill", CELL_PARTIAL, quick=True)
def empty_group(right, model, prefix, sent, group):
    """Nothing is recomputed, whatever is asked for."""
    return right(model, prefix, sent, type(group)(0, 0))


@wrong("31", "the most layers within the bound", f"{PARETO}:smallest_within", CELL_CHOICE)
def most_layers(right, groups, bound):
    return max((one for one in groups if one.relative_loss <= bound), key=lambda one: len(one.group))


@wrong("31", "a frontier of all groups", f"{PARETO}:frontier", CELL_CHOICE)
def no_frontier(right, groups):
    return sorted(groups, key=lambda one: len(one.group))


@wrong("32", "no E-cache is sent", f"{SCHEDULE}:Schedule.sends_e_cache", PIPELINE, quick=True)
def edge_never_sent(right, schedule, group):
    """A group starts from nothing that came."""
    return False


@wrong("32", "everything is sent", f"{SCHEDULE}:Schedule.layers", PIPELINE)
def everything_sent(right, schedule, group, depth):
    """The keys and values of the recomputed layers, too."""
    return list(range(depth))


@wrong("32", "load, then compute", f"{SCHEDULE}:simulate", PIPELINE)
def no_pipeline(right, jobs, way):
    """The computation waits for everything, whatever the schedule."""
    return right(jobs, type(way).SEND_REUSED)


@wrong("32", "a link ten times too fast", f"{SHAPED}:LinkConfig.bytes_per_s", SHAPED_LINK)
def ten_times(right, link):
    return 10 * right.fget(link)


@wrong("32", "a token bucket that leaks", f"{SHAPED}:TokenBucket.book", SHAPED_LINK)
def booked_too_early(right, bucket, count, now):
    """Every tenth byte is booked."""
    return right(bucket, count / 10, now)


rewritten("32", "the E-cache goes last in the cell", "return [*edge, *layers]", "return [*layers, *edge]", PIPELINE)
rewritten("32", "the pipeline of the cell waits for all", "awaited = edge if pipelined else", "awaited =", PIPELINE)


rewritten("33", "a cell without the E-cache", "sent.e_cache[group.lo] if group.lo else", "", CELL_PARTIAL)
rewritten("33", "judged where it was chosen", "loss(chosen, judging)", "loss(chosen, choosing)", CELL_CHOICE)
rewritten("33", "the largest group in the cell", "chosen = min(within", "chosen = max(within", CELL_CHOICE)


@wrong("33", "every layer is computed", f"{PREFILL}:partial_prefill", CELL_PARTIAL)
def every_layer_computed(right, model, prefix, sent, group):
    """Whichever group is asked for."""
    return right(model, prefix, sent, type(group)(0, 6))


@wrong("33", "a blend that mends nothing", "firsttoken.droidspeak.blend:blended_cache", BLEND)
def blend_nothing(right, model, prefix, sent, *share, **options):
    """The sender's cache comes back as it is."""
    from firsttoken.droidspeak.forward import cache_of

    return cache_of(sent.kv)


@wrong("33", "a blend of the least deviating tokens", "firsttoken.droidspeak.blend:_deviation", BLEND, quick=True)
def least_deviating(right, recomputed, sent):
    return 1 / (1 + right(recomputed, sent))


@wrong("33", "exact match of anything", "firsttoken.scoring:exact_match", SCORE)
@wrong("33", "full F1 for anything", "firsttoken.scoring:token_f1", SCORE)
@wrong("33", "any text is alike", "firsttoken.scoring:edit_similarity", SCORE)
def all_right(right, prediction, answers):
    return 1.0


rewritten("34", "no bound in the cell", "if profiled.relative_loss <= bound]", "]", TRANSFER)
rewritten("34", "the largest group in the cell", "key=lambda profiled: (len(", "key=lambda profiled: (-len(", TRANSFER)
rewritten(
    "34", "judged as a gain", "full - mixed for full, mixed", "mixed - full for full, mixed", TRANSFER, quick=True
)


@wrong("34", "a group judged by its neighbour", "firsttoken.droidspeak.profile.profile_transfer:item_losses", TRANSFER)
def judged_by_another(right, groups, group):
    return right(groups, groups[-1].group)


@wrong("35", "blind to the link", f"{SELECTION}:choose_group", LINK)
def blind_to_the_link(right, candidates, costs, now, *rest):
    """A group is chosen as if the link were endless."""
    return right(candidates, costs, replace(now, bytes_per_s=inf), *rest)


@wrong("35", "any loss is allowed", f"{SELECTION}:_choices", LINK)
def any_loss_is_allowed(right, candidates, costs, now, bound):
    return right(candidates, costs, now, inf)


@wrong("35", "the first belief stays", f"{SELECTION}:LinkEstimate.observe", BELIEF)
def the_first_belief_stays(right, estimate, nbytes, seconds):
    """What a transfer took changes nothing."""


AGENTS = "^MechanismError: the adapters of the two agents"


@wrong("62", "adapters of no strength", f"{ADAPTERS}:LoraConfig.scale", AGENTS)
def no_strength(right, config, module):
    return 0.0


@wrong("62", "adapters of half their strength", f"{ADAPTERS}:LoraConfig.scale", AGENTS)
def half_the_strength(right, config, module):
    return right(config, module) / 2


COPY = "^MechanismError: the copy out of the pool of the cell"
rewritten("62", "blocks in the order of the pool", "rows[blocks].permute", "rows[sorted(blocks)].permute", COPY)


rewritten("36", "the shorter of the two", "return max(", "return min(", "the rule of the cell `mechanism`", quick=True)
rewritten(
    "36", "the link is forgotten", "return max(computing_s, loading_s)", "return computing_s", "the rule of the cell"
)


rewritten("35", "no loss bound in the cell", "for g in groups if g.loss <= bound)", "for g in groups)", LINK)
rewritten("35", "the cell forgets the E-cache", "if group.needs_e_cache else 0.0", "if False else 0.0", LINK)
