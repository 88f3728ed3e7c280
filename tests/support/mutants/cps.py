"""Wrong versions of what CPS describes."""

from __future__ import annotations

import time

from firsttoken.engine.preemption.preemption_policy import Action
from firsttoken.engine.request import Phase
from mutants.running import rewritten, wrong

CHOOSE, ONLINE = "firsttoken.cps.policies:CrossPoint.choose", "firsttoken.cps.policies:OnlineCrossPoint"
HOST_ROWS = "firsttoken.engine.swap.coalesced:HostRows"
CELL = "policy of the cell"

rewritten("03", "the long request is swapped", "tokens <= 1024 else", "tokens > 1024 else", CELL, quick=True)
rewritten("03", "a tie of 1,024 tokens is recomputed", "tokens <= 1024 else", "tokens < 1024 else", CELL)
BOTH_WAYS, EARLIER = "the cost of both ways of the cell `mechanism`", "the first token of the cell `mechanism`"
rewritten("47", "one way only in the cell", "return recompute, 2 * one_way", "return recompute, one_way", BOTH_WAYS)
rewritten("47", "copies for nothing in the cell", "one_way = copies * copy_s + ", "one_way = ", BOTH_WAYS, quick=True)
rewritten("47", "nobody waits for the link in the cell", "max(computing, loading)", "computing", EARLIER, quick=True)
rewritten("47", "no hidden states in the cell", " + entry_bytes) / bytes_s", ") / bytes_s", EARLIER)
SWAP = "the cost of a swap of the cell `mechanism`"
rewritten("48", "one way only in the cell", "return 2 * (blocks", "return (blocks", SWAP, quick=True)
rewritten("48", "copies for nothing in the cell", "(blocks * copies_a_block * copy_s + ", "(", SWAP)
rewritten(
    "24", "the last that came is the first", "return max(running", "return min(running", "rules of the cell", quick=True
)
rewritten(
    "24",
    "the first that came is the last",
    "return min(running, key=lambda request: request.order)",
    "return max(running, key=lambda request: request.order)",
    "rules of the cell",
)
rewritten("03", "the crossing the other way round", "before <= 0 < after", "before > 0 >= after", CELL)


@wrong("03", "the cross-point inverted", CHOOSE, "cross-point policy")
@wrong("22", "the cross-point inverted", CHOOSE, CELL, quick=True)
def inverted(right, policy, tokens, now_s):
    return Action.RECOMPUTE if tokens <= policy.threshold else Action.SWAP


@wrong("03", "a policy that says nothing", CHOOSE, "cross-point policy")
@wrong("22", "a policy that says nothing", CHOOSE, CELL)
def says_nothing(right, policy, tokens, now_s):
    return None


@wrong("22", "a policy that raises", CHOOSE, CELL)
def raises(right, policy, tokens, now_s):
    raise KeyError(tokens)


@wrong(
    "22",
    "whoever fits comes back",
    "firsttoken.engine.schedulers.scheduler:Scheduler.resume",
    "queue of swapped requests",
)
def queue_without_order(right, scheduler):
    for request in sorted(scheduler.swapped, key=lambda request: request.order):
        blocks = scheduler.pool.allocate(scheduler._missing(request, request.cached + 1), admission=True)
        if blocks is not None:
            request.blocks = blocks
            scheduler.preemptor.restore(request)
            scheduler.move_to(request, Phase.RUNNING if scheduler.preemptor.poll(request) else Phase.RESTORING)


@wrong("21", "each gather 50 ms slower", f"{HOST_ROWS}.gather", "coalesced swap", quick=True)
def slow_gather(right, rows, blocks, span):
    move = right(rows, blocks, span)
    return lambda: (time.sleep(0.05), move())[1]


@wrong("21", "blocks back in another order", f"{HOST_ROWS}.scatter", "`(coalesced|overlapped)` of the cell")
def sorted_blocks(right, rows, span, blocks):
    return right(rows, span, sorted(blocks))


@wrong("21", "keys without values", "firsttoken.engine.swap.per_block:keys_and_values", "`per_block` of the cell")
def keys_only(right, block):
    return right(block)[::2]


rewritten("21", "a cut that forgets the values", "for kind in (0, 1)]", "for kind in (0,)]", "`per_block` of the cell")
rewritten("21", "blocks in the order of the pool", "torch.tensor(blocks)", "torch.tensor(sorted(blocks))",
          "`coalesced` of the cell")  # fmt: skip


@wrong("21", "a swap that returns nothing", "firsttoken.engine.swap.coalesced:Overlapped.into", "overlapped swap")
def no_transfer(right, swap, span, blocks):
    return None


@wrong("23", "a policy that never learns", f"{ONLINE}.observe", "curve of the cell")
def never_learns(right, policy, seen):
    pass


@wrong("23", "the dearer way is taken", f"{ONLINE}.predict", "curve of the cell")
def the_dearer_way(right, policy, action, tokens):
    return 1 / (right(policy, action, tokens) + 1e-9)


@wrong("23", "nothing is forgotten", "firsttoken.cps.policies.online:CostCurve.__init__", "curve of the cell")
def never_forgets(right, curve, memory):
    right(curve, 1e9)


rewritten(
    "23",
    "no fixed term in the cell",
    "tokens**2]) @ self.prices)",
    "tokens**2])[1:] @ self.prices[1:])",
    "curve of the cell",
)


@wrong("23", "no fixed term", "firsttoken.cps.policies.online:CostCurve.predict", "curve of the cell", quick=True)
def no_fixed_term(right, curve, tokens):
    return max(right(curve, tokens) - curve._prices[0], 1e-9)
