"""Layers that come, borrowed ones, chunks, preemption by cross-point, another model's cache and clients that leave, in
one engine: tiny random weights, fp32. What has only keys and values of its own weights says what the plain model says.
"""

from __future__ import annotations

import copy
import random
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import closing
from types import SimpleNamespace

import pytest
import torch
from borrowing import TIMEOUTS, nothing_is_left
from plain_tokens import Plain, check_greedy
from senders import STORED, Senders
from swarms import DEPTH, Asked

from firsttoken.cps.policies import make_policy
from firsttoken.droidspeak.prefill import Group, full_prefill, partial_prefill, suffix_logits
from firsttoken.droidspeak.prefix import Prefix
from firsttoken.engine.engine import EngineConfig
from firsttoken.engine.live_executor import LiveExecutor
from firsttoken.engine.request import Request, Sampling
from firsttoken.engine.trace import Trace
from firsttoken.link.shaped import Link
from firsttoken.study.errors import RequestError
from firsttoken_extras.layer_borrowing.arrivals import LayerArrivals
from firsttoken_extras.layer_borrowing.lease import Lease
from firsttoken_extras.layer_borrowing.lender import Lender
from firsttoken_extras.layer_borrowing.prefix_offer import group_at
from firsttoken_extras.layer_borrowing.replica import BorrowingReplica

CONFIG = EngineConfig(scheduler="sarathi", requests=6, token_budget=9, watermark=0.0)
TOKENS = 12
GROUPS = (Group(0, 0), Group(2, 4), Group(3, 6), Group(5, 6), Group(0, 3))
SCHEDULES = 120


@pytest.fixture(scope="module")
def known(asked) -> list[Asked]:
    return [asked(length, TOKENS) for length in range(17, 29)]


@pytest.fixture(scope="module")
def senders(lent, known, tmp_path_factory) -> Senders:
    """A twin of the model, whose cache is exact, and a stranger, whose cache is not."""
    stranger = copy.deepcopy(lent)
    with torch.no_grad(), torch.random.fork_rng():
        torch.manual_seed(1)
        for parameter in stranger.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    models = {"twin": copy.deepcopy(lent), "stranger": stranger}
    return Senders(lent, models, tmp_path_factory.mktemp("senders") / "store", [one.prompt for one in known])


@pytest.fixture
def borrowing(lent, neighbour) -> Iterator[Callable]:
    def make(policy: str, blocks: int = 64, host_blocks: int = 100, threshold: int = 20) -> SimpleNamespace:
        arrivals = LayerArrivals(DEPTH)
        executor = LiveExecutor(lent, blocks, block_tokens=4, host_blocks=host_blocks)
        lenders = [Lender(neighbour.server.record.address, range(DEPTH))]
        lease, trace = Lease(lenders, neighbour.model, DEPTH, 32, timeouts=TIMEOUTS), Trace()
        named = {"threshold": threshold} if policy == "cross_point" else {}
        replica = BorrowingReplica(
            executor, lent.model.layers, arrivals, lease, CONFIG, policy=make_policy(policy, **named), trace=trace
        )
        return SimpleNamespace(replica=replica, arrivals=arrivals, trace=trace, close=replica.close)

    yield make


def perform(made: SimpleNamespace, senders: Senders, known: list[Asked], rng: random.Random, seen: Counter) -> None:
    """One schedule to its end; each request that was not cancelled is held to the plain model."""
    replica, arrivals = made.replica, made.arrivals
    arrivals.come()
    comes = sorted(rng.randint(0, 70) for _ in range(DEPTH))
    waiting = sorted((rng.randint(0, 9), number) for number in range(rng.randint(4, 8)))
    leaves = {rng.randint(1, 40): rng.randrange(8) for _ in range(rng.choice((0, 0, 1, 2)))}
    held: list[tuple[Request, Asked]] = []
    left: set[Request] = set()
    step = 0
    while waiting or replica.engine.busy:
        while comes and comes[0] <= step:
            comes.pop(0)
            arrivals.come()
        while waiting and (waiting[0][0] <= step or not replica.engine.busy):
            waiting.pop(0)
            one, offer = rng.choice(known), None
            if rng.random() < 0.5:
                link = rng.choice((None, Link(), Link(fail_after_bytes=rng.randint(0, 12_000))))
                offer = senders.offer(one.prompt, rng.choice(GROUPS), "twin", link)
            held.append((replica.submit(one.prompt, Sampling(TOKENS), offer=offer), one))
            seen["taken" if offer and not held[-1][0].fell_back else "own"] += 1
        if (number := leaves.get(step, 99)) < len(held) and not held[number][0].finished:
            left.add(held[number][0])
            replica.engine.cancel(held[number][0])
        assert not replica.lease.gone or len(comes) == 0, replica.lease.gone
        replica.step()
        replica.engine.pool.check()
        step += 1
        assert step < 50_000
    for request, one in held:
        if request in left:
            seen["left"] += 1
            continue
        assert check_greedy(request.output, one.plain) == TOKENS
        seen["said"] += 1
    assert replica.engine.pool.free == replica.engine.pool.count
    seen.update(f"{recovery.action}, {recovery.reason}" for recovery in made.trace.recoveries)
    seen["lent"] += replica.lease.steps > 0


def test_every_mixture_says_what_the_plain_model_says(borrowing, senders, known, neighbour):
    seen: Counter = Counter()
    for seed in range(SCHEDULES):
        rng = random.Random(seed)
        blocks, host = rng.choice((10, 14, 18, 24)), rng.choice((0, 8, 100, 100))
        with closing(borrowing("cross_point", blocks, host, rng.choice((24, 30, 100)))) as made:
            perform(made, senders, known, rng, seen)
    nothing_is_left(neighbour.server)
    assert seen["said"] > 2 * SCHEDULES and seen["lent"] > SCHEDULES // 2, seen
    for what in ("taken", "own", "left", "swap, policy", "recompute, policy", "recompute, moved to another view"):
        assert seen[what] > SCHEDULES // 12, seen


def reference(lent, senders: Senders, one: Asked, group: Group) -> Plain:
    """What partial prefill says after the stranger's cache, by transformers alone."""
    prefix = Prefix.of([one.prompt[:STORED]])
    sent = full_prefill(senders.models["stranger"], prefix, senders.edges)
    said: list[int] = []
    logits = []
    for _ in range(TOKENS):
        cache = partial_prefill(lent, prefix, sent, group)
        rest = torch.tensor([[*one.prompt[STORED:], *said]])
        logits.append(suffix_logits(lent, prefix, rest, cache, keep=1)[0, -1])
        said.append(int(logits[-1].argmax()))
    return Plain(said, torch.stack(logits).float())


@pytest.mark.parametrize("here", [1, 3, 4, DEPTH])
@pytest.mark.parametrize("group", GROUPS, ids=str)
def test_a_strangers_cache_at_a_replica_that_lacks_layers(borrowing, lent, senders, known, here, group):
    """It says what partial prefill of the group that ends with the model says, while layers come in the middle of it;
    and where all are here, what that of the pair's own group says."""
    one, taken = known[4], group_at(group, senders.edges, here, DEPTH)
    wanted = reference(lent, senders, one, taken) if len(taken) < DEPTH else one.plain
    with closing(borrowing("recompute")) as made:
        made.arrivals.come(1 + here)
        made.replica.step()  # takes over what is here
        request = made.replica.submit(one.prompt, Sampling(TOKENS), offer=senders.offer(one.prompt, group, "stranger"))
        while len(request.output) < 2:
            made.replica.step()
        if here < DEPTH:
            made.arrivals.come(DEPTH - here)
        made.replica.run()
    assert bool(request.fell_back) == (len(taken) == DEPTH)
    assert check_greedy(request.output, wanted) == TOKENS


def test_a_strangers_cache_is_not_taken_for_exact(borrowing, senders, known, monkeypatch):
    """The control of the mixture: were the twin the stranger, it would be seen."""
    with closing(borrowing("cross_point")) as made, pytest.raises(AssertionError, match="wins by"):
        monkeypatch.setitem(senders.identities, "twin", senders.identities["stranger"])
        for seed in range(10):
            perform(made, senders, known, random.Random(seed), Counter())


def test_states_that_are_not_kept_right_are_seen(borrowing, senders, known, monkeypatch):
    """The control of the boundary: hidden states behind the last layer, taken for what enters the borrowed ones."""
    from firsttoken.engine.hidden_state_cache import HiddenStateCache

    enter = HiddenStateCache.enter
    monkeypatch.setattr(
        HiddenStateCache, "enter", lambda kept, layer, hidden, chunks: enter(kept, layer, hidden.roll(1, 1), chunks)
    )
    with pytest.raises(AssertionError, match="wins by"):
        for seed in range(10):
            with closing(borrowing("cross_point")) as made:
                perform(made, senders, known, random.Random(seed), Counter())


@pytest.mark.parametrize(
    ("group", "edges", "here", "wanted"),
    [
        (Group(2, 4), (1, 2, 3, 4, 5), 3, Group(2, 6)),
        (Group(2, 4), (1, 2, 3, 4, 5), 1, Group(1, 6)),
        (Group(4, 5), (2,), 3, Group(2, 6)),
        (Group(4, 5), (4,), 3, Group(0, 6)),
        (Group(0, 0), (1, 3), 3, Group(3, 6)),
        (Group(0, 3), (1, 2), 3, Group(0, 6)),
        (Group(2, 4), (1, 2), 0, Group(0, 6)),
        (Group(2, 4), (1, 2), 6, Group(2, 4)),
    ],
)
def test_the_group_ends_with_the_model_while_layers_are_lacking(group, edges, here, wanted):
    assert group_at(group, edges, here, DEPTH) == wanted


def test_a_group_that_does_not_fit_is_refused():
    with pytest.raises(RequestError, match=r"group \[2, 9\) does not fit 6 layers"):
        group_at(Group(2, 9), (), 0, DEPTH)


def test_an_offer_that_cannot_be_taken_says_why(borrowing, senders, known):
    """With no layer here there is nothing below a group; a store that has dropped the prefix says so."""
    one = known[0]
    with closing(borrowing("swap")) as made:
        made.arrivals.come()
        request = made.replica.submit(
            one.prompt, Sampling(TOKENS), offer=senders.offer(one.prompt, Group(2, 4), "twin")
        )
        assert request.fell_back == "no hidden states are kept at or below layer 0"
        made.arrivals.come(DEPTH)
        made.replica.run()
        other = [255, *one.prompt[1:]]
        late = made.replica.submit(other, Sampling(2), offer=senders.offer(other, Group(2, 4), "twin"))
        assert "no stored context" in late.fell_back, late.fell_back
        made.replica.run()
        assert check_greedy(request.output, one.plain) == TOKENS and len(late.output) == 2
