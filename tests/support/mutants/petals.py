"""Wrong versions of what PETALS describes."""

from __future__ import annotations

from dataclasses import replace

import torch

from mutants.running import rewritten, wrong

WIRE, PLACEMENT = "firsttoken.petals.int8_transport", "firsttoken.petals.placement"
EXTEND, KEPT = "firsttoken.petals.chain:Chain._extend", "firsttoken.engine.hidden_state_cache:HiddenStateCache.of"
FROZEN, AUDITOR = "firsttoken.petals.tuning.frozen:FrozenBlocks", "firsttoken.petals.trust.auditor"
LINEAR8, CHAIN = "firsttoken.engine.linear8:Linear8.forward", "firsttoken.petals.routing:best_chain"
BORROWING = "firsttoken_extras.layer_borrowing.replica:BorrowingReplica._switch_to"

JOIN, SEARCH = "the rule `join` of the cell `mechanism`", "the search `shortest` of the cell `mechanism`"
OVER_THE_WIRE = "the wire `over_the_wire` of the cell `mechanism`"
PRODUCT = "the product `mixed_product` of the cell `mechanism`"
SURVIVING = "the chain `Surviving` of the cell `mechanism`"
THROUGH = "the function `ThroughServers` of the cell `mechanism`"
AUDIT, READING = "the rule `audit` of the cell `mechanism`", "the functions `sent` and `attack` of the cell `mechanism`"
BORROW, DIVIDE = (
    "the rule `take_over` or the class `Borrowing` of the cell",
    "the rule `divide` of the cell `mechanism`",
)
SESSION, CLIENT = "the session of the cell `mechanism`", "the client of the library"

rewritten("06", "the newest alone is kept", "self.kept[part] += states", "self.kept[part] = states", SESSION)
rewritten("06", "a successor is sent the newest alone", "[server.seen :]", "[-1:]", SESSION)


@wrong("06", "the worst chain first", CHAIN, CLIENT)
@wrong("52", "the worst chain first", CHAIN, SEARCH)
def the_worst_chain_first(right, servers, layers, without=()):
    near = {one.name: one for one in servers}
    slow = [replace(one, ping_s=0.0, throughput=1 / one.throughput) for one in servers]
    return [type(hop)(near[hop.server.name], hop.blocks) for hop in right(slow, layers, without)]


@wrong("06", "a chain that does not replace", EXTEND, CLIENT, quick=True)
@wrong("50", "a chain that does not replace", EXTEND, SURVIVING)
async def no_successor(right, chain, layers, why="", *rest):
    return [] if why else await right(chain, layers, why, *rest)


@wrong("06", "a successor is sent zeros", KEPT, SESSION)
@wrong("50", "a successor is sent zeros", KEPT, SURVIVING)
@wrong("56", "layers are taken over from zeros", KEPT, BORROW)
def nothing_was_kept(right, cache, request, layer, start=0):
    kept = right(cache, request, layer, start)
    return torch.cat([torch.zeros_like(kept[:, :-1]), kept[:, -1:]], 1) if kept.shape[1] > 8 else kept


rewritten(
    "50",
    "zeros are kept",
    "self.kept.get(layers, hidden)[",
    "torch.zeros_like(self.kept.get(layers, hidden))[",
    SURVIVING,
)
rewritten("50", "all is sent at every step", "cached = line.known.get(chunk.number, 0)", "cached = 0", SURVIVING)
rewritten(
    "50",
    "a successor is sent the newest alone",
    "cached = line.known.get(chunk.number, 0)",
    "cached = chunk.start",
    SURVIVING,
)

rewritten("51", "codes are cut off", ".clamp_min(1e-30)).round()", ".clamp_min(1e-30)).trunc()", OVER_THE_WIRE)
rewritten(
    "51",
    "outliers are left out",
    "return integer_part + (x - rest) @ (w * w_scale).t()",
    "return integer_part",
    PRODUCT,
)


@wrong("51", "one scale for a batch", f"{WIRE}:pack", OVER_THE_WIRE)
def one_scale_for_all(right, hidden, block=None):
    from firsttoken.petals import int8_transport

    block = block or int8_transport.BLOCK
    rows = int8_transport._in_blocks(hidden.float(), block)
    scales = (rows.abs().amax() / 127).expand(rows.shape[:-1]).contiguous()
    codes = (rows / scales[..., None]).round().to(torch.int8).flatten(-2)[..., : hidden.shape[-1]].contiguous()
    return {"codes": codes, "scales": scales, "block": torch.tensor([block], dtype=torch.int32)}


@wrong("51", "an 8-bit wire that answers nothing", f"{WIRE}:unpack", OVER_THE_WIRE, quick=True)
def nothing_comes_back(right, tensors, dtype):
    return None


@wrong("51", "outliers in the integers", LINEAR8, PRODUCT)
def outliers_in_the_integers(right, linear, x):
    linear.threshold = float("inf")
    return right(linear, x)


rewritten(
    "52", "a server takes the first blocks", "start = min(range(depth - count + 1), key", "start = max([0], key", JOIN
)
rewritten("52", "round trips are left out", "server.ping_s + (end - first)", "(end - first)", SEARCH)
rewritten("52", "the slowest of all chains", "min(ways)", "max(ways)", SEARCH)


@wrong("52", "a server goes where most is", f"{PLACEMENT}:_neediest", JOIN, quick=True)
def where_most_is(right, rates, count):
    return right(-rates, count)


@wrong("52", "a server takes no blocks", f"{PLACEMENT}:interval_to_join", JOIN)
def no_place(right, servers, depth, count):
    return range(0)


@wrong("52", "a chain blind to round trips", CHAIN, SEARCH)
def blind_to_round_trips(right, servers, layers, without=()):
    near = {one.name: one for one in servers}
    hops = right([replace(one, ping_s=0.0) for one in servers], layers, without)
    return [type(hop)(near[hop.server.name], hop.blocks) for hop in hops]


rewritten(
    "53",
    "the first server goes back first",
    "ctx.servers[::-1], ctx.entered[::-1]",
    "ctx.servers, ctx.entered",
    THROUGH,
)
rewritten(
    "53",
    "the inputs of the first server alone",
    "ctx.entered.append(hidden)",
    "ctx.entered.append(([*ctx.entered, hidden])[0])",
    THROUGH,
)
rewritten(
    "53",
    "the gradient goes back as it came",
    "(server(entered), entered, gradient)  #",
    "(entered, entered, gradient)  #",
    THROUGH,
)


@wrong("53", "a server passes the gradient on", f"{FROZEN}._backward", THROUGH)
def the_gradient_passes_through(right, blocks, layers, hidden, gradient, one):
    return gradient, right(blocks, layers, hidden, gradient, one)[1]


@wrong("53", "a server learns", f"{FROZEN}._forward", THROUGH)
def a_server_learns(right, blocks, *given):
    out = right(blocks, *given)
    for layer in blocks._model.model.layers:
        layer.mlp.down_proj.weight.data.mul_(0.99)
    return out


rewritten("54", "a tolerance beyond the lie", "keeper, tolerance=1e-3", "keeper, tolerance=1e-1", AUDIT, quick=True)
rewritten("54", "whoever differs is convicted", "if apart(answer, truth) > tolerance:", "if True:", AUDIT)
rewritten("54", "any signature is taken", "if signed != (digest(inputs), digest(answer)):", "if not signed:", AUDIT)
rewritten(
    "54",
    "the client sends noise",
    "    return states\n\n\ndef attack",
    "    return 9 * states.abs()\n\n\ndef attack",
    READING,
)
rewritten(
    "54",
    "the attacker learns nothing",
    "torch.eye(len(squares)), products",
    "torch.eye(len(squares)), 0 * products",
    READING,
)


@wrong("54", "an audit that always agrees", f"{AUDITOR}:difference", AUDIT)
def whatever_is_said_agrees(right, said, there):
    return 0.0


@wrong("54", "a keeper that convicts nobody", f"{AUDITOR}:Auditor._convicts", AUDIT)
async def the_accused_is_believed(right, auditor, evidence):
    return False


rewritten("56", "nothing is taken over", "    return come\n", "    return 0\n", BORROW, quick=True)
rewritten("56", "layers come without their past", "self.entered = self.own[self.here](self.entered)", "pass", BORROW)
rewritten(
    "56", "the last process fetches the most", "goal = before[-1] * process / count", "goal = before[1] / 2", DIVIDE
)


@wrong("56", "all layers or none are taken over", BORROWING, BORROW)
def all_or_nothing_is_taken_over(right, replica, come):
    return right(replica, come) if come == len(replica._layers) else None


GROUP = "the group of the cell `mechanism`"
rewritten(
    "61", "a group above the layers that have come", "if edge <= highest", "if edge <= group.lo", GROUP, quick=True
)
rewritten("61", "a group that does not end with the model", "default=0), depth)", "default=0), group.hi)", GROUP)
